"""A reward turned round: it judges the problem's own answer instead of a response."""

from __future__ import annotations

from actors.environments.base import Problem
from actors.environments.rewards.base import Response, Reward


class GoldCheck(Reward):
    """Scores a problem's own answer instead of a response: 1, None when there is nothing to check, or an error that says what is wrong."""

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
