"""Kill the engine and the trainer of a run in its midst, and compare its accuracy with that of the same run left alone.

    undisturbed run                                                                     ┐
    the same ─► SIGKILL an engine at 1/3 of its steps ─► a policy worker at 2/3 ─► end  ├─► accuracies, audit, times
                                                                                        ┘
Both run at the same time, as commands: on a machine with GPUs for both, `--gpus 0 1` gives each its own; `--gpus 0,1 0,1` lets them share.

python -m tests.chaos.accuracy --recipe smollm2-135m-1gpu --gpus 0 1 steps=90
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.rollout.audit import audit
from actors.rollout.journal import parse
from configs import settings
from configs.loader import load
from tasks.reporting.jsonl import read_lines
from tests.chaos.progress import steps_done, the_directory
from tests.conftest import ROOT
from tests.e2e.commands import processes_with

_VICTIMS = ("ray::Engine", "ray::PolicyWorkerActor")
_VALIDATION = "accuracy/validation"


@dataclass
class Kill:
    """One SIGKILL. Times are Unix times."""

    who: str
    at_step: int
    at: float = 0.0
    step: int = -1  # the last one done before it
    back: float = 0.0  # when a step beyond that had been done


@dataclass
class Run:
    """A command, and what is done to it."""

    name: str
    home: Path
    arguments: list[str]
    gpus: str | None
    kills: list[Kill] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def output(self) -> Path:
        return self.home / self.name / "runs"

    @property
    def log(self) -> Path:
        return self.home / f"{self.name}.log"

    def work(self, limit_s: float) -> int:
        """To its end. Returns the exit code; -1: it did not end in time."""
        self.output.mkdir(parents=True)
        own = {
            "GRPO_TEST_MARK": self.mark,
            "GRPO_FLOWS_FORKS": "",
            "PREFECT_HOME": str(self.output.parent / "prefect"),
            "PREFECT_API_URL": "",
        }
        if self.gpus is not None:
            own["CUDA_VISIBLE_DEVICES"] = self.gpus
        command = [sys.executable, "-m", "flows.grpo", *self.arguments, f"output_dir={self.output}"]
        deadline = time.monotonic() + limit_s
        with self.log.open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=settings.child_environment(**own), stdout=log, stderr=subprocess.STDOUT)
            try:
                while (code := process.poll()) is None and time.monotonic() < deadline:
                    self._look()
                    time.sleep(0.2)
            finally:
                process.kill()
        return -1 if code is None else code

    def _look(self) -> None:
        done = steps_done(self.output)
        for kill in self.kills:
            if kill.at and not kill.back and done > kill.step:
                kill.back = time.time()
        due = next((kill for kill in self.kills if not kill.at), None)
        if due is None or done < due.at_step:
            return
        pids = [pid for pid, line in processes_with(self.mark).items() if line.startswith(due.who)]
        if pids:
            os.kill(min(pids), signal.SIGKILL)
            due.at, due.step = time.time(), done
            print(f"{time.strftime('%H:%M:%S')} {self.name}: killed {due.who} after step {done}", flush=True)

    def accuracies(self) -> dict[int, float]:
        """Of each validation, by step."""
        return {row["step"]: row[_VALIDATION] for row in read_lines(the_directory(self.output) / "metrics.jsonl") if _VALIDATION in row}


def compare(calm: Run, fire: Run, samples: int) -> tuple[list[str], dict[str, Any]]:
    """What is not as it should be, and what was found."""
    problems = [f"{kill.who} was not killed: the run was too short" for kill in fire.kills if not kill.at]
    directory = the_directory(fire.output)
    found = audit(parse((directory / "journal.jsonl").read_bytes()))
    if not found.clean:
        problems.append(f"audit: {found.verdict}")
    theirs, ours = calm.accuracies(), fire.accuracies()
    last = theirs[max(theirs)], ours[max(ours)]
    mean = sum(last) / 2
    noise = 3 * math.sqrt(2 * max(mean * (1 - mean), 0.01) / samples)  # three deviations of a difference of two proportions
    if max(theirs) != max(ours) or abs(last[0] - last[1]) > noise:
        problems.append(f"accuracy {last[1]:.3f}, undisturbed {last[0]:.3f}: more than noise ({noise:.3f}) apart")
    path = directory / "losses.jsonl"
    losses = [dict(loss) for loss in read_lines(path)] if path.exists() else []
    kills = []
    ends = [*(kill.at for kill in fire.kills[1:]), math.inf]  # of an engine of an asynchronous run that comes back no loss is written down
    for kill, end in zip(fire.kills, ends, strict=True):
        noticed = next((loss["time"] for loss in losses if kill.at <= loss["time"] < end), None)
        kills.append({
            "who": kill.who, "after_step": kill.step, "noticed_s": None if noticed is None else round(noticed - kill.at, 1),
            "step_beyond_s": round(kill.back - kill.at, 1) if kill.back else None,
        })  # fmt: skip
    return problems, {"undisturbed": theirs, "killed": ours, "noise": round(noise, 3), "kills": kills, "audit": found.verdict}


def main() -> int:
    """Returns the exit code: 0 all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic-cpu")
    parser.add_argument("--gpus", nargs=2, metavar=("CALM", "KILLED"), help="CUDA_VISIBLE_DEVICES of each run (default: all for both)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that the runs may take")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs' directories and logs, which stay")
    options, overrides = parser.parse_known_args()
    config = load(options.recipe, overrides)
    arguments = ["--recipe", options.recipe, *overrides]
    gpus = options.gpus or (None, None)
    with tempfile.TemporaryDirectory(prefix="grpo-accuracy-") if options.keep is None else nullcontext(options.keep.absolute()) as folder:
        home = Path(folder)
        calm = Run("undisturbed", home, arguments, gpus[0])
        fire = Run("killed", home, arguments, gpus[1])
        fire.kills = [Kill(who, config.steps * (index + 1) // 3) for index, who in enumerate(_VICTIMS)]
        with ThreadPoolExecutor(2) as pool:
            codes = list(pool.map(lambda run: run.work(options.limit), (calm, fire)))
        problems: list[str] = []
        facts: dict[str, Any] = {}
        for run, code in zip((calm, fire), codes, strict=True):
            if code:
                problems.append(f"{run.name}: ended with {code}")
                print(run.log.read_text(errors="replace")[-4000:])
        if not problems:
            problems, facts = compare(calm, fire, config.environment.validation_size)
    for problem in problems:
        print(f"PROBLEM {problem}")
    difference = None if not facts else round(list(facts["killed"].values())[-1] - list(facts["undisturbed"].values())[-1], 3)
    print(json.dumps({"name": "chaos.accuracy", "value": difference, "unit": "accuracy, killed less undisturbed", "detail": facts
                      | {"recipe": options.recipe, "problems": problems}}))  # fmt: skip
    return 1 if problems else 0


if __name__ == "__main__":
    settings.apply_defaults()
    sys.exit(main())
