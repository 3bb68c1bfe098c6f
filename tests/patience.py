"""How long a test waits for what must come."""

from __future__ import annotations

import time
from typing import Any

import ray

WAIT_S = 600.0  # machines are shared: an actor whose start takes 5 s on one took 150 s on another. Only a failing test waits this long.


def kill(handle: Any) -> None:
    """End an actor, and wait for its end: `ray.kill` returns before, and meanwhile the actor goes on to answer."""
    ray.kill(handle)
    deadline = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < deadline:
            ray.get(handle.__ray_ready__.remote(), timeout=WAIT_S)
            time.sleep(0.05)
    except ray.exceptions.RayActorError:
        return
    raise TimeoutError(f"{handle} lives")
