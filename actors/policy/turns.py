"""Whose turn it is at the policy group, when the stages of a step are sent to it ahead of time.

    logprob ──────┐
                  ├► train ─► refit        calls of one step: they may come at once, and in any order
    ref_logprob ──┘

A stage that is sent only when the one before has come back waits for both ways and for two task runs. Sent ahead, it is planned while the
others compute, and begins when they have ended well: not when they fail (they may be repeated, and it goes on waiting), and never once
its step was withdrawn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.waiting import ActorTimeoutError


class WithdrawnError(RuntimeError):
    """A stage was not begun, and will not be: its step was given up."""


@dataclass(frozen=True)
class Turn:
    """The place of a call.

    Attributes:
        after: stages of the same step that must have ended well before this one begins.
    """

    step: int
    stage: str
    after: tuple[str, ...] = ()

    @property
    def patience(self) -> int:
        """Stages that may run before this one's answer comes, itself included."""
        return 1 + len(self.after)


class Turns:
    """Of one run, whose steps come one after the other. For several threads.

    Args:
        timeout_s: longest time for which a waiting call may see no other begin or end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._changes = 0
        self._ended: set[tuple[int, str]] = set()
        self._withdrawn = 0

    @contextmanager
    def take(self, turn: Turn) -> Iterator[None]:
        """Wait for the turn; the block is the stage, which has ended well unless it raises.

        Raises:
            WithdrawnError: the step was withdrawn before. ActorTimeoutError: nothing went on before it.
        """
        self._wait(turn)
        try:
            yield
        except BaseException:
            self._note()
            raise
        self._note(turn)

    def withdraw(self, step: int) -> None:
        """Stages of this step, and of those before it, that wait or are still to come do not begin any more."""
        with self._changed:
            self._withdrawn = step
            self._changed.notify_all()

    def _wait(self, turn: Turn) -> None:
        with self._changed:
            while missing := [stage for stage in turn.after if (turn.step, stage) not in self._ended]:
                self._check(turn)
                before, deadline = self._changes, time.monotonic() + self._timeout_s
                while self._changes == before:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise ActorTimeoutError(
                            f"{turn.stage} of step {turn.step}: {', '.join(missing)} had not ended, and nothing went on for "
                            f"{self._timeout_s:.0f} s"
                        )
                    self._check(turn)
            self._check(turn)
        self._note()

    def _check(self, turn: Turn) -> None:
        if turn.step <= self._withdrawn:
            raise WithdrawnError(f"{turn.stage} of step {turn.step} was not begun: a stage before it failed, or the run ended")

    def _note(self, ended: Turn | None = None) -> None:
        with self._changed:
            self._changes += 1
            if ended is not None:
                self._ended = {(step, stage) for step, stage in self._ended if step >= ended.step} | {(ended.step, ended.stage)}
            self._changed.notify_all()
