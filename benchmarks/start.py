"""How long a person waits: from the command to the first step of the warm start of recipe arithmetic-cpu. About a minute.

`make run`'s command twice, each ended after its first step. The first finds no database of Prefect's, as on a new machine; the second is
the number. Both have a Prefect server and a Ray of their own.

  value        seconds from the command to the first supervised step's loss
  detail.at    the same to other lines that it prints
  detail.cpu   CPU seconds by part until then: with two cores the value is at least half of their sum
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.children import ROOT
from configs import settings

_MARK = "GRPO_FLOWS_BENCHMARK_START"  # in the environment of all that the command starts
_STEP = "warm start 1/"
_LINES = {  # what a line begins with, and what has been done then
    "Prefect UI:": "prepared, Prefect's server answers",
    "starting Ray: done": "Ray runs",
    _STEP: "step",
}
_ACTORS = {  # by what stands in the title that Ray gives the process
    "Engine": "engine",
    "PolicyWorker": "policy workers",
    "PolicyGroup": "policy group",
    "Collector": "collector",
    "Controller": "data plane",
    "StorageUnit": "data plane",
    "Ledger": "ledger",
    "EnvironmentActor": "rewards",
}
_OTHERS = {"actors.environments.": "rewards", "prefect server": "Prefect's server", "flows.console": "flow"}  # by command line
_END_S = 60.0


def part_of(command: str) -> str:
    """Whose process it is."""
    return next((part for words, part in (_ACTORS if command.startswith("ray::") else _OTHERS).items() if words in command), "Ray")


def cpu_by_part(mark: str) -> dict[str, float]:
    """CPU seconds of the processes, of those that are there, whose environment has the mark."""
    found: Counter[str] = Counter()
    for process in psutil.process_iter():
        try:
            if f"{_MARK}={mark}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                times = process.cpu_times()
                found[part_of(" ".join(process.cmdline()))] += times.user + times.system
        except (psutil.Error, OSError):  # it has ended, or is not ours
            continue
    return {part: round(seconds, 1) for part, seconds in found.most_common()}


def start(home: Path, name: str) -> dict[str, Any]:
    """One start. Returns seconds from the command to each line, and CPU seconds by part.

    Raises:
        RuntimeError: the command ended before its first step.
    """
    arguments = ["-m", "flows.console", "run", "arithmetic-cpu", f"name={name}", f"output_dir={home / 'runs'}", "warm_start.check_every=1"]
    environment = settings.child_environment(
        PYTHONPATH=settings.python_path(ROOT),
        PREFECT_HOME=str(home / "prefect"),
        PREFECT_API_URL="",
        RAY_ADDRESS="",
        PYTHONUNBUFFERED="1",
        **{_MARK: name},
    )
    began, at, said = time.monotonic(), dict[str, float](), list[str]()
    command = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert command.stdout is not None
    try:
        for line in command.stdout:
            said.append(line)
            for words, label in _LINES.items():
                if line.startswith(words):
                    at.setdefault(label, round(time.monotonic() - began, 1))
            if line.startswith(_STEP):
                return {"at": at, "cpu": cpu_by_part(name)}
    finally:
        command.send_signal(signal.SIGINT)
        try:
            command.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            command.kill()
    raise RuntimeError(f"the command ended before its first step; it said:\n{''.join(said)[-3000:]}")


def main() -> None:
    """Measure and print one JSON line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the command ends too
    with tempfile.TemporaryDirectory() as place:
        first, again = (start(Path(place), name) for name in ("first", "again"))
    detail = {
        **again,
        "cpu_sum": round(sum(again["cpu"].values()), 1),
        "first_on_a_machine": first["at"]["step"],
        "cores": settings.cpu_count(),
    }
    print(json.dumps({"name": "start", "value": again["at"]["step"], "unit": "s to the first warm-start step", "detail": detail}))


if __name__ == "__main__":
    main()
