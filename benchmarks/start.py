"""How long a person waits: from the command to a run's first step, supervised where the recipe has a warm start. About a minute.

`make run`'s command twice, each ended after its first step. The first finds no database of Prefect's and no caches (converted models,
compiled kernels), as on a new machine; the second finds the first one's, and is the number. Each has its own Prefect server and Ray.

  value        seconds from the command to the first step's line
  detail.at    the same to other lines that it prints
  detail.ready what engine and policy say of their own start
  detail.cpu   CPU seconds by part until then: with two cores the value is at least half of their sum
  detail.memory_gib   of all its processes then; what several share counts once

    .venv/bin/python -m benchmarks.start [--recipe arithmetic-cpu] [field=value ...]
"""

from __future__ import annotations

import argparse
import json
import re
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
_STEP = "(warm start|step) 1/"
_READY = "(engine-0|policy): "  # what an actor says of its own start
_LINES = {  # what a line begins with, and what has been done then
    "Prefect UI:": "prepared, Prefect's server answers",
    "starting Ray: done": "Ray runs",
    "engine-0: .* ready": "the engine is ready",
    "starting the actors.*: done": "all actors are ready",
    _STEP: "step",
}
# Where libraries keep what they have made, by the variable that says where.
_CACHES = {"XDG_CACHE_HOME": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
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
_SERVER = "actors.forks.server"
_OTHERS = {  # by command line, or by the title that a process gives itself
    "actors.environments.": "rewards",
    _SERVER: "imports",
    "prefect server": "Prefect's server",
    "flows.console": "flow",
    "VLLM::": "engine",
    "compile_worker": "Inductor's compilers",
}
_END_S = 60.0


def part_of(command: str, parent: str = "") -> str:
    """Whose process it is, by its command line and its parent's."""
    if _SERVER in command and _SERVER in parent:
        return "engine"  # a fork that gives itself no title: vLLM's core, where it finds no setproctitle
    return next((part for words, part in (_ACTORS if command.startswith("ray::") else _OTHERS).items() if words in command), "Ray")


def cost(mark: str) -> dict[str, Any]:
    """CPU seconds by part, and memory, of the processes whose environment has the mark, of those that are there."""
    seconds, memory = Counter[str](), 0
    for process in psutil.process_iter():
        try:
            if f"{_MARK}={mark}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                times, parent = process.cpu_times(), process.parent()
                part = part_of(" ".join(process.cmdline()), " ".join(parent.cmdline()) if parent else "")
                seconds[part] += times.user + times.system
                memory += process.memory_full_info().pss
        except (psutil.Error, OSError):  # it has ended, or is not ours
            continue
    return {"cpu": {part: round(total, 1) for part, total in seconds.most_common()}, "memory_gib": round(memory / 2**30, 2)}


def start(home: Path, name: str, recipe: str, overrides: list[str]) -> dict[str, Any]:
    """One start. Returns seconds from the command to each line, and its cost until then. Args: home: with the caches.

    Raises:
        RuntimeError: the command ended before its first step.
    """
    arguments = [
        "-m",
        "flows.console",
        "run",
        recipe,
        f"name={name}",
        f"output_dir={home / 'runs'}",
        "warm_start.check_every=1",
        *overrides,
    ]
    environment = settings.child_environment(
        PYTHONPATH=settings.python_path(ROOT),
        PREFECT_HOME=str(home / "prefect"),
        PREFECT_API_URL="",
        RAY_ADDRESS="",
        PYTHONUNBUFFERED="1",
        **{_MARK: name},
        **{variable: str(home / folder) for variable, folder in _CACHES.items()},
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
                if re.match(words, line):
                    at.setdefault(label, round(time.monotonic() - began, 1))
            if re.match(_STEP, line):
                ready = [one.strip() for one in said if re.match(_READY, one)]
                return {"at": at, "ready": ready, **cost(name)}
    finally:
        command.send_signal(signal.SIGINT)
        try:
            command.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            command.kill()
    raise RuntimeError(f"the command ended before its first step; it said:\n{''.join(said)[-3000:]}")


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic-cpu")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the command ends too
    with tempfile.TemporaryDirectory() as place:
        first, again = (start(Path(place), name, options.recipe, options.overrides) for name in ("first", "again"))
    detail = {
        **again,
        "cpu_sum": round(sum(again["cpu"].values()), 1),
        "first_on_a_machine": first["at"],
        "cores": settings.cpu_count(),
    }
    print(json.dumps({"name": "start", "value": again["at"]["step"], "unit": f"s to the first step of {options.recipe}", "detail": detail}))


if __name__ == "__main__":
    main()
