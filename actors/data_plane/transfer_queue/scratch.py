"""Scratch memory for packing puts. Fresh memory costs six times the copy itself: its pages have to be faulted in first.

put A ── take ──► buffer ── pack, send, answered ── give ──► kept for put B        (not given after an error: ZMQ may still read it)
"""

from __future__ import annotations

import torch

_ALIGN = 64


class Scratch:
    """Keeps one buffer, the largest that was given back and at most `most` bytes. For one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: torch.Tensor | None = None

    def take(self, size: int) -> torch.Tensor:
        """uint8 [at least `size`], contents undefined."""
        kept, self._kept = self._kept, None
        return kept if kept is not None and len(kept) >= size else torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nobody reads any more."""
        if len(buffer) <= self._most and (self._kept is None or len(self._kept) < len(buffer)):
            self._kept = buffer


def aligned(size: int) -> int:
    """`size` rounded up, so that what follows it in a buffer is aligned for any dtype."""
    return -(-size // _ALIGN) * _ALIGN
