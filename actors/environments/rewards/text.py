"""Rewards on the text of a response: equal to the answer, or of a form."""

from __future__ import annotations

import re
from collections import deque

from actors.environments.base import Problem
from actors.environments.rewards.base import Response, Reward
from configs import rewards as configured
from configs.base import ConfigError


class ExactReward(Reward):
    """1 when the response, or what its pattern finds last, is the answer. See `configs.rewards.ExactReward`."""

    def __init__(self, config: configured.ExactReward) -> None:
        self._pattern = re.compile(config.pattern) if config.pattern is not None else None
        self._ignore = str.maketrans("", "", config.ignore)
        self._ignore_case = config.ignore_case

    def score(self, problem: Problem, response: Response) -> float:
        wanted, found = self._plain(problem.answer), self._found(response.text)
        return float(bool(wanted) and found is not None and self._plain(found) == wanted)

    def check(self, problem: Problem) -> None:
        if not self._plain(problem.answer):
            raise ValueError("the answer is empty, and no response can equal it")

    def reference(self, problem: Problem) -> str | None:
        """The answer; None when the pattern does not find it in the bare answer: it wants words around it."""
        return problem.answer if self._found(problem.answer) == problem.answer or self._pattern is None else None

    def corrupted(self, problem: Problem) -> str | None:
        """None where the comparison overlooks the difference: of "Anna" turned round with ignore_case, of "Ax" with the pattern [A-D]."""
        wrong = super().corrupted(problem)
        found = None if wrong is None else self._found(wrong)
        return None if found is None or self._plain(found) == self._plain(problem.answer) else wrong

    def _found(self, text: str) -> str | None:
        if self._pattern is None:
            return text
        found = deque(self._pattern.finditer(text), maxlen=1)
        return found[0][1 if self._pattern.groups else 0] if found else None

    def _plain(self, text: str) -> str:
        plain = text.translate(self._ignore).strip()
        return plain.casefold() if self._ignore_case else plain


class RegexReward(Reward):
    """1 when the pattern is found in the response, or fits all of it."""

    def __init__(self, config: configured.RegexReward) -> None:
        pattern = re.compile(config.pattern)
        self._fits = pattern.fullmatch if config.full else pattern.search

    def score(self, problem: Problem, response: Response) -> float:
        return float(self._fits(response.text) is not None)


class LengthReward(Reward):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), of the response's tokens.

    0 up to max - cache tokens, then (max - cache - tokens) / cache, and -1 above max.

    Raises:
        ConfigError: the punishment would begin below no tokens.
    """

    def __init__(self, config: configured.LengthReward, max_new_tokens: int) -> None:
        self._most = config.max_tokens or max_new_tokens
        self._cache = config.cache_tokens or max(1, self._most // 5)
        if self._cache > self._most:
            raise ConfigError(
                f"rewards.{config.label}.cache_tokens ({self._cache}) is above rollout.max_new_tokens ({self._most}): "
                "every response would be punished; lower it"
            )

    def score(self, problem: Problem, response: Response) -> float:
        if response.tokens > self._most:
            return -1.0
        return min(0.0, (self._most - self._cache - response.tokens) / self._cache)
