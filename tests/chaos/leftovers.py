"""Runs in a row, ended in five ways, leave nothing on the machine: no semaphore, no temporary file, no process.

    a run that warms the caches ─► look ─► run, ended in one of the ways ─► look ─► ...    the same each time
    what a SIGKILL leaves is there until the next run has started

python -m tests.chaos.leftovers             20 runs, about 20 minutes on two cores
python -m tests.chaos.leftovers --runs 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from configs import settings
from tests.conftest import ROOT
from tests.e2e.commands import await_none, has_trained, processes_with, start_command
from tests.e2e.conftest import SHORT

LONG = [*(one for one in SHORT if not one.startswith("steps=")), "steps=100000", "recovery.restarts=0"]
_PATIENCE_S = 900.0  # also on a machine that others use
_ALONE = "GRPO_LEFTOVERS_ALONE"


def look() -> set[str]:
    """What lies in the places where a run could leave something."""
    return {str(path) for place in ("/dev/shm", tempfile.gettempdir()) for path in Path(place).iterdir()}


def lose_a_worker(process: subprocess.Popen[str], mark: str) -> None:
    """The run fails: it may not come back from a loss."""
    assert process.poll() is None
    (pid,) = [pid for pid, line in processes_with(mark).items() if line.startswith("ray::PolicyWorkerActor")]
    os.kill(pid, signal.SIGKILL)


def send(number: signal.Signals) -> Callable[[subprocess.Popen[str], str], None]:
    """A signal to the flow's process."""
    return lambda process, _: process.send_signal(number)


# How a run ends, by what is done to it after its first step; and its exit code.
WAYS: dict[str, tuple[Callable[[subprocess.Popen[str], str], None] | None, int]] = {
    "done": (None, 0),
    "failed": (lose_a_worker, 1),
    "Ctrl-C": (send(signal.SIGINT), 130),
    "SIGTERM": (send(signal.SIGTERM), 143),
    "SIGKILL": (send(signal.SIGKILL), -signal.SIGKILL),
}


def run(way: str, output: Path) -> None:
    """One run that is ended in this way; none of its processes is there when this returns."""
    output.mkdir()
    mark = uuid.uuid4().hex
    end, code = WAYS[way]
    process = start_command("grpo", output, mark, *(SHORT if end is None else LONG))
    deadline = time.monotonic() + _PATIENCE_S
    while end is not None and not has_trained(output):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not train"
        time.sleep(0.1)
    if end is not None:
        end(process, mark)
    said = process.communicate(timeout=_PATIENCE_S)[0]
    assert process.returncode == code, f"{way}: ended with {process.returncode}\n{said}"
    await_none(mark, 150.0)  # of a killed run Ray's agents stay for a minute
    shutil.rmtree(output)


def leftovers(runs: int, ways: list[str], output: Path) -> list[str]:
    """Returns what was found, a line each."""
    run("done", output / "warm")
    before, problems = look(), []
    for number, way in enumerate([*itertools.islice(itertools.cycle(ways), runs), "done"]):
        started = time.monotonic()
        run(way, output / str(number))
        left = look() - before
        print(f"{number} {way}: {time.monotonic() - started:.0f} s, left {len(left)}", flush=True)
        if left and way != "SIGKILL":
            problems.append(f"run {number} ({way}) or one before it left {', '.join(sorted(left)[:5])} (in all {len(left)})")
    return problems


def alone(arguments: list[str]) -> None:
    """Go on in namespaces of this command's own, where nobody else makes semaphores; returns where the kernel gives none."""
    # The shell stays: it is process 1 there and takes in the dead. Ray's actors hold a raylet that nobody took in for one that lives.
    inside = f'mount -t tmpfs none /dev/shm; {sys.executable} -m tests.chaos.leftovers "$@"; exit $?'
    for user in ([], ["--user", "--map-root-user"]):
        unshare = ["unshare", *user, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False, capture_output=True).returncode == 0:
            os.chdir(ROOT)
            os.execvpe("unshare", [*unshare, "sh", "-c", inside, "sh", *arguments], settings.child_environment(**{_ALONE: "1"}))
    print("the kernel gives no namespaces: what others on this machine leave meanwhile is counted as well", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 nothing was left."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.leftovers", description="Runs leave nothing, however they end.")
    parser.add_argument("--runs", type=int, default=20, help="(default: 20)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="in turn (default: all five)")
    options = parser.parse_args(given)
    if settings.get(_ALONE) is None:
        alone(given)
    started = time.monotonic()
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="left-", dir=base) as output, tempfile.TemporaryDirectory(prefix="t", dir=base) as place:
        with settings.variables(TMPDIR=place):
            tempfile.tempdir = place
            problems = leftovers(options.runs, options.ways or list(WAYS), Path(output))
        tempfile.tempdir = None
    for problem in problems:
        print(f"PROBLEM {problem}")
    minutes = round((time.monotonic() - started) / 60, 1)
    print(json.dumps({"name": "leftovers", "value": len(problems), "unit": "runs that left something", "detail": {"minutes": minutes}}))
    return 1 if problems else 0


if __name__ == "__main__":
    settings.apply_defaults()
    sys.exit(main())
