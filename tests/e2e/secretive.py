"""Sums by an environment that wants a key, and a reward that wants another; both look for what they were not given."""

from __future__ import annotations

import hashlib
import os

from actors.environments import Environment, Problem, Split

NOT_GIVEN = "E2E_NOT_GIVEN"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check(key: str, wanted: str) -> None:
    """Raises: it has another key, or what is not for it."""
    if digest(key) != wanted:
        raise PermissionError("another key")
    if NOT_GIVEN in os.environ:
        raise PermissionError(f"{NOT_GIVEN} is here")


class Sums(Environment):
    """a + b, of digits."""

    def __init__(self, api_key: str, wanted: str) -> None:
        check(api_key, wanted)
        self._key = api_key

    def size(self, split: Split) -> int:
        return 90 if split == "train" else 10

    def problem(self, split: Split, index: int) -> Problem:
        a, b = divmod(index if split == "train" else 90 + index, 10)
        return Problem(f"{a}+{b}", f"Calculate {a} + {b}.", str(a + b))

    def score(self, problem: Problem, response: str) -> float:
        if len(response) > 3:
            raise ValueError(f"too long, says {self._key}")  # careless: it must not be repeated
        return float(response.strip() == problem.answer)


class Short:
    """1 for a response of at most two characters."""

    def __init__(self, service: dict[str, str], wanted: str) -> None:
        check(service["token"], wanted)

    def __call__(self, completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) <= 2) for text in completions]
