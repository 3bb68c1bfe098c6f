"""Parts of a benchmark that run in processes of their own, one at a time, and the machine that they run on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from actors.node import query_gpus
from configs import settings

ROOT = Path(__file__).parent.parent
_SAID = 2000  # characters of a log that a message ends with


class FailedError(RuntimeError):
    """A process did not end well; the message has the end of what it said."""


def run(words: Sequence[str], log: Path, *, nice: bool = False, limit_s: float | None = None) -> float:
    """A command of this Python's, to its end. Returns its seconds.

    Args:
        words: after `python`. log: gets what it prints.

    Raises:
        FailedError: its exit code was not 0, or it was still there at the limit.
    """
    began = time.monotonic()
    command = [*(["nice"] if nice else []), sys.executable, *words]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=settings.child_environment(), stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"none within {limit_s:g} s"
        finally:
            process.terminate()  # nothing, once it has ended; else it clears up
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    if code:
        raise FailedError(f"exit code {code}; {log} ends:\n{log.read_text(errors='replace')[-_SAID:]}")
    return time.monotonic() - began


def device() -> str:
    """The first GPU's name, or that there is none and how many cores. CUDA is not asked: that would take memory of the GPU."""
    found = _gpu("name")
    return found or f"CPU, {settings.cpu_count()} cores"


def lease() -> str:
    """Names this machine and its GPU until the machine is started again: times of two leases are not to be compared."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text()[:8] if boot.exists() else '-'}/{_gpu('uuid') or '-'}"


def _gpu(what: str) -> str | None:
    if settings.gpus_are_hidden():
        return None
    return next((value for (value,) in query_gpus(what, only=settings.get("CUDA_VISIBLE_DEVICES"))), None)
