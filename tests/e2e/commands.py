"""Commands as a person types them, in processes that can be told apart by a mark in their environment."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from configs import settings
from tests.conftest import ROOT


def pids_with(mark: str) -> list[int]:
    """The processes whose environment holds the mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended while we looked, or is not ours
            if mark.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes whose environment holds the mark."""
    found = []
    for pid in pids_with(mark):
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120])
    return found


def start_command(flow: str, output: Path, mark: str, *overrides: str) -> subprocess.Popen[str]:
    """`python -m flows.<flow>`, with a Prefect server and a Ray of its own; the run writes below `output`.

    Ray's workers are its own children, not forks of the tests' zygote: those would not have the mark.
    """
    return subprocess.Popen(
        [sys.executable, "-m", f"flows.{flow}", f"output_dir={output}", *overrides],
        cwd=ROOT,
        env=settings.child_environment(GRPO_TEST_MARK=mark, TESTS_ZYGOTE="", PREFECT_HOME=str(output / "prefect"), PREFECT_API_URL=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def has_trained(output: Path) -> bool:
    """Whether the run that writes below `output` has done a step."""
    metrics = list(output.glob("*/metrics.jsonl"))
    return bool(metrics) and '"step": 1' in metrics[0].read_text()


def await_none(mark: str, timeout_s: float, leaving: tuple[str, ...] = ()) -> None:
    """Until no process has the mark but those named `leaving`."""
    deadline = time.monotonic() + timeout_s
    while left := [line for line in processes_with(mark) if not line.startswith(leaving)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
