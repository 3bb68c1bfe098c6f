"""What a reward is: one response to one problem in, a number out, or None for no opinion."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from actors.environments.base import Problem

_LONGEST_NUMBER = 4000  # digits: Python refuses to read longer ones


@dataclass(frozen=True)
class Response:
    """What a reward sees of a response.

    Attributes:
        text: without special tokens. tokens: how many were generated, the end token included. truncated: it had no room to end.
    """

    text: str
    tokens: int
    truncated: bool


class Reward(ABC):
    """Computed in a scoring process: it may hang, raise or die, and neither the run nor the next response is hurt."""

    @abstractmethod
    def score(self, problem: Problem, response: Response) -> float | None:
        """The raw value, a finite number; None: no opinion on this response."""

    def check(self, problem: Problem) -> None:  # noqa: B027  (most have nothing to check)
        """See that this reward can judge responses to the problem.

        Raises:
            ValueError: it cannot; says why, without naming the problem.
        """

    def reference(self, problem: Problem) -> str | None:
        """A response that must count as a success; None: there is none to make."""
        return None

    def corrupted(self, problem: Problem) -> str | None:
        """A response that must not count as a success; None: there is none to make."""
        right = self.reference(problem)
        return None if right is None else corrupt(right)


def corrupt(answer: str) -> str:
    """Another answer: the last number one higher, or the letters turned round."""
    if numbers := list(re.finditer(r"\d+", answer)):
        last = numbers[-1]
        return f"{answer[: last.start()]}{int(last.group()[:_LONGEST_NUMBER]) + 1}{answer[last.end() :]}"
    turned = answer.strip()[::-1]
    return turned if turned.casefold() != answer.strip().casefold() else f"{answer}x"


class GoldCheck(Reward):
    """A reward turned round, which scores a problem's own answer instead of a response: 1; None when there is nothing to check."""

    def __init__(self, reward: Reward, threshold: float) -> None:
        self._reward, self._threshold = reward, threshold

    def score(self, problem: Problem, response: Response) -> float | None:
        """
        Raises:
            ValueError: the reward cannot judge the problem, calls its answer wrong, or a corrupted one right.
        """
        self._reward.check(problem)
        right = self._reward.reference(problem)
        if right is None:
            return None
        if not self._succeeds(problem, right):
            raise ValueError(f"its own answer {_short(right)} does not count as right")
        wrong = self._reward.corrupted(problem)
        if wrong is not None and self._succeeds(problem, wrong):
            raise ValueError(f"a wrong answer, {_short(wrong)} in place of {_short(right)}, counts as right")
        return 1.0

    def _succeeds(self, problem: Problem, text: str) -> bool:
        value = self._reward.score(problem, Response(text, 1, False))
        return value is not None and value >= self._threshold


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
