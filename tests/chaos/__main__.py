"""Kill parts of two runs at random, with a fixed seed, and prove that nothing was lost: `make chaos`.

    make up ─► undisturbed run ─► the same, while a killer sends SIGKILL: flow process, Prefect worker, collector, ledger, scoring,
                                  storage, engine, policy worker ─► audit, metrics against the undisturbed run ─► table

python -m tests.chaos --kills 20 --mode sync        one run; the default is both, 40 kills, at most 45 minutes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from prefect.client.schemas.objects import FlowRun

from actors.rollout.audit import Audit, audit
from actors.rollout.journal import parse
from configs import settings
from flows.service.parts import Record, look
from tasks.reporting.jsonl import read_lines
from tests.chaos.progress import steps_done, the_directory
from tests.e2e.deployed import Deployed
from tests.e2e.test_resume import numbers, samples

SMALL = [
    "model.hidden_size=64", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.intermediate_size=96",
    "model.num_hidden_layers=2", "environment.validation_size=96", "environment.train_size=500", "rollout.prompts_per_step=4",
    "rollout.responses_per_prompt=4", "warm_start.steps=40", "warm_start.check_every=40", "warm_start.batch_size=16",
    "policy.batching.micro_batch_size=8", "policy.updates_per_step=1", "generation.kv_cache_gib=0.125", "generation.max_num_seqs=32",
    "validate_every=1000", "checkpoint.every_steps=1", "recovery.restarts=6", "recovery.reruns=6",
]  # fmt: skip
# What is killed, and the title of its process in Ray's session. The last two take long to start: at most ten of them.
ACTORS = {
    "collector": "ray::Collector", "ledger": "ray::LedgerActor", "scoring": "ray::EnvironmentActor", "storage": "ray::StorageUnit",
    "engine": "ray::Engine", "policy worker": "ray::PolicyWorkerActor",
}  # fmt: skip
HEAVY, MOST_HEAVY = ("engine", "policy worker"), 10
KINDS = ("flow process", "Prefect worker", *ACTORS)
_HASTY = 0.2  # of the kills do not wait until a step has been done since the one before
_STALL_S = 600.0  # a run that does nothing for so long has failed


@dataclass
class Kill:
    """One SIGKILL. Times are Unix times; `noticed` and `back` are 0 until they are known."""

    kind: str
    at: float
    noticed: float = 0.0
    back: float = 0.0


@dataclass
class Outcome:
    """One run under fire."""

    mode: str
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    audit: Audit | None = None


def schedule(kills: int, seed: int) -> list[str]:
    """What is killed, in order: every kind about equally often, but at most ten that take long to start."""
    chance = random.Random(seed)
    heavy = [HEAVY[i % 2] for i in range(min(MOST_HEAVY, kills // 4))]
    light = [kind for kind in KINDS if kind not in HEAVY]
    plan = heavy + [light[i % len(light)] for i in range(kills - len(heavy))]
    chance.shuffle(plan)
    return plan


class Killer:
    """Sends the kills of a plan to one run, most of them when the run has gone on since the one before."""

    def __init__(self, machine: Deployed, run: FlowRun, output: Path, plan: list[str], chance: random.Random) -> None:
        self._machine, self._run, self._output, self._plan, self._chance = machine, run, output, plan, chance
        self.kills: list[Kill] = []

    def work(self) -> str:
        """Until the run has ended. Returns its state."""
        last, since, hasty = -1, time.monotonic(), False
        due = time.monotonic() + self._chance.uniform(0, 5)
        while (state := self._machine.state(self._run)[0]) not in ("COMPLETED", "FAILED", "CANCELLED"):
            steps = steps_done(self._output)
            if steps > last:
                since = time.monotonic()
                if self.kills and not self.kills[-1].back:
                    self.kills[-1].back = time.time()
            last = steps  # lower than before where a resume has voided some
            # Sometimes also while the run comes back from the kill before.
            going = not self.kills or self.kills[-1].back or hasty
            if self._plan and going and steps >= 1 and time.monotonic() > due and self._kill(self._plan[0]):
                self._plan.pop(0)
                hasty = self._chance.random() < _HASTY
                due = time.monotonic() + self._chance.uniform(0, 30 if hasty else 8)
            if time.monotonic() - since > _STALL_S:
                return f"{state}, and did nothing for {_STALL_S:.0f} s"
            time.sleep(0.2)
        return state

    def _kill(self, kind: str) -> bool:
        pid = self._pid(kind)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(kind, time.time()))
        print(f"{time.strftime('%H:%M:%S')} step {steps_done(self._output)}: killed {kind}", flush=True)
        if kind == "Prefect worker":
            restart_worker(self._machine)
        return True

    def _pid(self, kind: str) -> int | None:
        if kind == "flow process":
            try:
                pid = self._machine.pid(self._run)
            except ValueError:  # it has none at present
                return None
            return pid if look(pid) is not None else None
        if kind == "Prefect worker":
            return self._machine.record.parts["worker"].pid
        for process in self._machine.record.parts["ray"].members():
            try:
                title = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[0]
            except OSError:
                continue
            if title.startswith(ACTORS[kind]):
                return process.pid
        return None


def restart_worker(machine: Deployed) -> None:
    """As whatever supervises a worker does: `make up` again."""
    machine.up()


def settle_times(kills: list[Kill], directory: Path, crashes: list[float]) -> None:
    """When each loss was noticed: by the run, as it wrote it down, or by Prefect. Args: crashes: Unix times of the run's state Crashed."""
    path = directory / "losses.jsonl"
    losses = [loss["time"] for loss in read_lines(path)] if path.exists() else []
    for kill, after in zip(kills, [*(kill.at for kill in kills[1:]), math.inf], strict=True):
        seen = losses if kill.kind in ACTORS else crashes
        kill.noticed = next((time for time in seen if kill.at <= time < after), 0.0)


def undisturbed(machine: Deployed, mode: str, steps: int, output: Path) -> Path:
    """A run that nobody kills."""
    run = machine.begin(f"grpo/{mode}", overrides=[*SMALL, f"output_dir={output}"], steps=steps)
    state = Killer(machine, run, output, [], random.Random(0)).work()
    assert state == "COMPLETED", state
    return the_directory(output)


def under_fire(machine: Deployed, mode: str, steps: int, output: Path, plan: list[str], seed: int, calm: Path) -> Outcome:
    """The same run, killed again and again."""
    outcome = Outcome(mode)
    run = machine.begin(f"grpo/{mode}", overrides=[*SMALL, f"output_dir={output}"], steps=steps)
    killer = Killer(machine, run, output, plan, random.Random(seed))
    state = killer.work()
    outcome.kills = killer.kills
    if state != "COMPLETED":
        outcome.problems.append(f"the run ended as {state}: {machine.state(run)[1]}")
    if plan:
        outcome.problems.append(f"{len(plan)} kills were left when the run had ended: give it more steps")
    directory = the_directory(output)
    settle_times(outcome.kills, directory, machine.crashes(run))
    outcome.audit = audit(parse((directory / "journal.jsonl").read_bytes()))
    if not outcome.audit.clean:
        outcome.problems.append(f"audit: {outcome.audit.verdict}")
    if mode == "sync" and (numbers(directory) != numbers(calm) or samples(directory) != samples(calm)):
        outcome.problems.append("metrics or samples differ from those of the undisturbed run")
    if mode == "async":
        ours, theirs = (numbers(path)[-1].get("accuracy/validation", math.nan) for path in (directory, calm))
        noise = 3 * math.sqrt(2 * max(theirs * (1 - theirs), 0.01) / 96)
        if not abs(ours - theirs) <= noise:  # or there is none: it ended before its last validation
            outcome.problems.append(f"accuracy {ours:.3f}, undisturbed {theirs:.3f}: more than noise ({noise:.3f}) apart")
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """Fault, times, noticed after, back after: medians and worst, in seconds."""
    rows = ["| fault | times | noticed after | a step done after |", "|---|---:|---|---|"]
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    for kind, number in Counter(kill.kind for kill in kills).items():
        of_kind = [kill for kill in kills if kill.kind == kind]
        rows.append(f"| {kind} | {number} | {_span(of_kind, lambda k: k.noticed)} | {_span(of_kind, lambda k: k.back)} |")
    return "\n".join(rows)


def _span(kills: list[Kill], when: Callable[[Kill], float]) -> str:
    waits = [when(kill) - kill.at for kill in kills if when(kill)]
    return f"{median(waits):.1f} s (worst {max(waits):.1f})" if waits else "–"


def chaos(modes: list[str], kills: int, steps: int, seed: int, home: Path) -> list[Outcome]:
    """Run all of it."""
    machine = Deployed(home, str(home / "runs"), Record(home / "ticks"))
    machine.up()
    try:
        outcomes = []
        for index, mode in enumerate(modes):
            plan = schedule(kills // len(modes), seed + index)
            calm = undisturbed(machine, mode, steps, home / f"{mode}-calm")
            outcomes.append(under_fire(machine, mode, steps, home / f"{mode}-fire", plan, seed + index, calm))
        return outcomes
    finally:
        machine.up("--down")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 all went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill parts of running runs; nothing may be lost.")
    parser.add_argument("--kills", type=int, default=40, help="in all (default: 40)")
    parser.add_argument("--steps", type=int, default=None, help="of each run (default: eight for each of its kills)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=["sync", "async", "both"], default="both")
    parser.add_argument(
        "--keep", type=Path, help="an empty folder for the runs' directories and logs, which stay (default: a temporary one)"
    )
    options = parser.parse_args(arguments)
    modes = ["sync", "async"] if options.mode == "both" else [options.mode]
    steps = options.steps or 8 * (options.kills // len(modes)) + 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo-chaos-") if options.keep is None else nullcontext(options.keep.absolute()) as home:
        outcomes = chaos(modes, options.kills, steps, options.seed, Path(home))
    print(table(outcomes))
    facts: dict[str, Any] = {}
    for outcome in outcomes:
        assert outcome.audit is not None
        print(f"{outcome.mode}: {len(outcome.kills)} kills; audit: {outcome.audit.verdict}")
        for problem in outcome.problems:
            print(f"PROBLEM {outcome.mode}: {problem}")
        facts[outcome.mode] = {"kills": len(outcome.kills), "problems": outcome.problems}
    print(json.dumps({"name": "chaos", "value": sum(len(o.kills) for o in outcomes), "unit": "kills survived", "detail": facts
                      | {"minutes": round((time.monotonic() - started) / 60, 1)}}))  # fmt: skip
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    settings.apply_defaults()
    sys.exit(main())
