"""SIGTERM and Ctrl-C during the steps of a run: the present step ends, is saved, and then the run ends.

first signal ─► asked ─► the step ends, a checkpoint is written ─► end: what the signal would have done at once
                  └── second signal, or grace_s are over ─► that, at once
"""

from __future__ import annotations

import _thread
import logging  # noqa: F401  (registers its at-fork hooks before ours, so they run inside them)
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

_SIGNALS = signal.SIGTERM, signal.SIGINT
_RESEND_S = 0.02

# An entry for each fork in progress. Python ignores exceptions in at-fork hooks: SystemExit raised in one of logging's would be lost, and
# its lock stay held. Signal handlers do not run inside these hooks of ours, because they are C functions.
_forks: list[None] = []
os.register_at_fork(before=partial(_forks.append, None), after_in_parent=_forks.pop, after_in_child=_forks.clear)


@contextmanager
def terminated() -> Iterator[None]:
    """A SIGTERM inside the block unwinds it. Prefect gives the signal back to this handler when it has cancelled the flow's run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unwind(number: int, _: FrameType | None) -> None:
    if _forks:
        _thread.start_new_thread(_resend, (number,))  # without a lock of `threading`, which this thread may hold
        return
    raise SystemExit(128 + number)


def _resend(number: int) -> None:
    time.sleep(_RESEND_S)
    os.kill(os.getpid(), number)


class Stopping:
    """Whether somebody asked the run to end. Only the main thread hears signals; elsewhere nothing changes."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._handlers: dict[int, Any] = {}
        self._asked: int | None = None
        self._timer: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        """A first signal has come."""
        return self._asked is not None

    @contextmanager
    def at_step_ends(self) -> Iterator[None]:
        """Inside the block a first signal only asks."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._handlers = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def end_if_asked(self) -> None:
        """Do what the signal would have done."""
        if self._asked is not None:
            self._do(self._asked)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self._asked is not None:
            self._do(number)
            return
        self._asked = number
        self._timer = threading.Timer(self._grace_s, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()

    def _do(self, number: int) -> None:
        handler = self._handlers[number]
        if callable(handler):
            handler(number, None)
            return
        signal.signal(number, handler)  # SIG_DFL, SIG_IGN
        signal.raise_signal(number)
