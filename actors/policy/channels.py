"""Lets the processes of a Ray compiled graph sleep while they wait for each other.

Ray 2.59 waits for a channel by asking for its semaphore in a loop (TryToAcquireSemaphore), with or without a deadline. A worker without
a request and an owner without an answer then take a core each: on a laptop's two cores half of all there is. Here a read asks once,
and between two questions sleeps for a hundredth of the time that it has waited, at most `_LONGEST_S`: a short answer comes as fast as
from Ray's loop, a late one at most so much later.
"""

from __future__ import annotations

import time
from typing import Any

from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.shared_memory_channel import Channel

_SPIN_S = 0.0003  # a back-to-back call is answered within this
_SHARE, _LONGEST_S = 0.01, 0.002

_ask: Any = Channel.read


def _read(channel: Channel, timeout: float | None = None) -> Any:
    """`Channel.read`: the next value.

    Args:
        timeout: seconds; None or -1: no deadline.

    Raises:
        RayChannelTimeoutError: nothing came in time. Or what Ray raises when the graph is torn down.
    """
    began = time.monotonic()
    while True:
        try:
            return _ask(channel, 0)
        except RayChannelTimeoutError:
            waited = time.monotonic() - began
            if timeout is not None and 0 <= timeout <= waited:
                raise
            if waited > _SPIN_S:
                time.sleep(min(_SHARE * waited, _LONGEST_S))


def sleep_while_waiting() -> None:
    """Replace Ray's read in this process. Idempotent; every process of a graph should call it."""
    Channel.read = _read  # type: ignore[method-assign]
