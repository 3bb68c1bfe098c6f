"""The order of a step's stages at the policy group, when they are sent to it ahead of time.

    logprob ──────┐
                  ├► train ─► refit        calls of one step: they may come at once, and in any order
    ref_logprob ──┘

A stage that is sent ahead is planned while the others compute, and begins when the stages before it have succeeded. After a failure it
goes on waiting, since a failed stage may be repeated. Once its step is withdrawn it never begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.waiting import ActorTimeoutError


class WithdrawnError(RuntimeError):
    """A stage will not begin: its step was withdrawn."""


@dataclass(frozen=True)
class Turn:
    """The place of a call in its step.

    Attributes:
        after: stages of the same step that must have succeeded before this one begins.
    """

    step: int
    stage: str
    after: tuple[str, ...] = ()

    @property
    def patience(self) -> int:
        """The number of stages that run until this one's answer, itself included."""
        return 1 + len(self.after)


class Turns:
    """The turns of one run, whose steps come one after the other. Thread-safe.

    Args:
        timeout_s: longest time in which a waiting call sees no other begin or end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._ended: set[tuple[int, str]] = set()
        self._withdrawn = 0

    @contextmanager
    def take(self, turn: Turn) -> Iterator[None]:
        """Wait for the turn; the block is the stage, which has succeeded unless it raises.

        Raises:
            WithdrawnError: the step was withdrawn. ActorTimeoutError: no stage began or ended for `timeout_s`.
        """
        with self._changed:
            while missing := [stage for stage in turn.after if (turn.step, stage) not in self._ended]:
                self._check(turn)
                if not self._changed.wait(self._timeout_s):  # every call that begins or ends notifies
                    raise ActorTimeoutError(
                        f"{turn.stage} of step {turn.step}: {', '.join(missing)} had not ended, and nothing went on for "
                        f"{self._timeout_s:.0f} s"
                    )
            self._check(turn)
        self._note()
        try:
            yield
        except BaseException:
            self._note()
            raise
        self._note(turn)

    def withdraw(self, step: int) -> None:
        """Stages of this step and of earlier ones that wait, or come later, do not begin."""
        with self._changed:
            self._withdrawn = step
        self._note()

    def _check(self, turn: Turn) -> None:
        if turn.step <= self._withdrawn:
            raise WithdrawnError(f"{turn.stage} of step {turn.step} was not begun: a stage before it failed, or the run ended")

    def _note(self, ended: Turn | None = None) -> None:
        with self._changed:
            if ended is not None:
                self._ended = {(step, stage) for step, stage in self._ended if step >= ended.step} | {(ended.step, ended.stage)}
            self._changed.notify_all()
