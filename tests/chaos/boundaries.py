"""Kill a run at every stage boundary of a step, and prove that it computes what it would have computed.

    undisturbed run
    the same, in a process that SIGKILLs itself before one stage of step 2 ─► again, from its checkpoint, before the next stage ─► ...
    ─► to the end: equal metrics and samples

python -m tests.chaos.boundaries        about eight minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from actors.rollout.audit import audit
from actors.rollout.journal import parse
from configs import settings
from tests.conftest import ROOT
from tests.e2e.commands import await_none
from tests.e2e.conftest import SHORT
from tests.e2e.test_resume import OFTEN, numbers, samples

# In the order of a step; the last two come after it.
STAGES = (
    "announce_weights", "submit_rollout", "close_step_before", "wait_for_rollout", "submit_logprob", "submit_ref_logprob", "show_samples",
    "wait_for_advantage", "submit_train", "submit_refit", "wait_for_train", "submit_clear", "wait_for_refit", "validate", "save", "export",
)  # fmt: skip
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # look every few seconds whether their raylet lives
_PATIENCE_S = 300.0


def die_before(stage: str) -> None:
    """In a run's own process: SIGKILL when step 2 comes to this stage."""
    from flows.grpo_session import GrpoSession, GrpoStep

    owner: Any = GrpoStep if hasattr(GrpoStep, stage) else GrpoSession
    original = getattr(owner, stage)

    def fatal(self: Any, *arguments: Any, **named: Any) -> Any:
        run = self._run if owner is GrpoStep else self
        if (self.number if owner is GrpoStep else self._steps_done + 1) >= 2:
            run.saving.wait()  # a checkpoint to go on from; kills while one is written: test_store
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **named)

    setattr(owner, stage, fatal)


def start(output: Path, log: Path, *overrides: str, stage: str = "") -> int:
    """One process of the run. Returns its exit code, when all that it started has ended."""
    mark = uuid.uuid4().hex
    own = {"PREFECT_HOME": str(output / "prefect"), "PREFECT_API_URL": "", "GRPO_FLOWS_FORKS": "", "GRPO_TEST_MARK": mark}
    command = [
        sys.executable,
        "-m",
        "tests.chaos.boundaries",
        "--die-before",
        stage,
        f"output_dir={output}/runs",
        *SHORT,
        *OFTEN,
        *overrides,
    ]
    with log.open("a") as file:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=settings.child_environment(**own),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
            check=False,
        ).returncode
    await_none(mark, 60, _AGENTS)
    return code


def boundaries(home: Path) -> list[str]:
    """Run all of it. Returns what was not as it should be."""
    calm, fire, log = home / "calm", home / "fire", home / "log"
    for folder in (calm, fire):
        folder.mkdir(parents=True)
    assert start(calm, log) == 0, log.read_text()[-3000:]
    undisturbed, directory = (one / "runs" / "arithmetic-cpu" for one in (calm, fire))
    resume: tuple[str, ...] = ()
    problems = []
    for stage in (*STAGES, ""):
        began = time.monotonic()
        code = start(fire, log, *resume, stage=stage)
        print(
            f"{time.strftime('%H:%M:%S')} {f'killed before {stage}' if stage else 'to the end'}: {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if code != (-signal.SIGKILL if stage else 0):
            problems.append(f"{stage or 'the last process'}: ended with {code}: {log.read_text().rstrip().splitlines()[-1]}")
            return problems
        resume = (f"resume={directory}",)
    if numbers(directory) != numbers(undisturbed):
        problems.append("metrics differ from those of the undisturbed run")
    if samples(directory) != samples(undisturbed):
        problems.append("samples differ from those of the undisturbed run")
    found = audit(parse((directory / "journal.jsonl").read_bytes()))
    if not found.clean or found.ends != {"trained": 12}:
        problems.append(f"audit: {found.verdict}")
    return problems


def main() -> int:
    """Returns the exit code: 0 all went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.boundaries", description="Kill a run at every stage boundary of a step.")
    parser.add_argument("--die-before", metavar="STAGE", help=argparse.SUPPRESS)  # in the run's own process
    options, overrides = parser.parse_known_args()
    if options.die_before is not None:
        import flows.training_session
        from flows.cli import main as command
        from flows.grpo import grpo
        from flows.grpo_session import GrpoSession

        flows.training_session._LEASE_S = 5.0  # how long a killed run's folder stays its own
        if options.die_before:
            die_before(options.die_before)
        return command(grpo, GrpoSession, overrides)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo-boundaries-") as home:
        problems = boundaries(Path(home))
    for problem in problems:
        print(f"PROBLEM {problem}")
    detail = {"problems": problems, "minutes": round((time.monotonic() - started) / 60, 1)}
    print(json.dumps({"name": "boundaries", "value": len(STAGES), "unit": "kills survived", "detail": detail}))
    return 1 if problems else 0


if __name__ == "__main__":
    settings.apply_defaults()
    sys.exit(main())
