"""How the processes of a Ray compiled graph wait for each other: they spin where the host has idle cores for them, and sleep elsewhere.

Ray 2.59 waits for a channel by polling its semaphore in a loop (TryToAcquireSemaphore), with or without a deadline. A worker without a
request and an owner without an answer then take a core each. A sleeping read polls once, and between two polls sleeps for a hundredth of
the time that it has waited, at most `_LONGEST_S`: a quick answer arrives almost as fast as with Ray's loop, a late one at most that late.
"""

from __future__ import annotations

import time
from typing import Any

from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.shared_memory_channel import Channel

_SPIN_S = 0.0003  # a back-to-back call is answered within this
_SHARE, _LONGEST_S = 0.01, 0.002
_OTHERS = 4  # cores

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


def has_idle_cores(readers: int, cores: int) -> bool:
    """Whether `readers` processes may spin: as many cores again are left for the others, and some for engines, the flow and Ray."""
    return cores >= 2 * readers + _OTHERS


def wait_by(*, spinning: bool) -> None:
    """How reads of this process wait from now on. All processes of a graph should wait alike."""
    setattr(Channel, "read", _ask if spinning else _read)  # noqa: B010  (mypy: a method is assigned to)
