"""A task for Ray's workers that imports next to nothing, so that it starts in no time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE


@task(name="count", task_run_name="count-{number}", cache_policy=NO_CACHE, persist_result=False)
def count(number: int, traces: str) -> tuple[int, int]:
    """Returns the number and the process's id. 7 fails once 8 is at work, which then works until it is interrupted."""
    trace = Path(traces)
    if number == 7:
        while not (trace / "still").exists():
            time.sleep(0.05)
        raise ValueError("seven")
    (trace / str(number)).touch()
    while number == 8:
        time.sleep(0.05)
        (trace / "still").touch()
    return number, os.getpid()
