"""What an environment is: numbered problems with a verifier.

A class of your own derives from `Environment` and is named in a recipe:

    environment: {kind: python, import_path: "my_package.my_module:MyEnvironment", options: {level: 3}}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Problem:
    """One prompt.

    Attributes:
        uid: unique within the split.
        question: what the user asks.
        answer: a correct answer, as supervised text and for reports.
        payload: whatever the verifier needs.
    """

    uid: str
    question: str
    answer: str
    payload: dict[str, Any] = field(default_factory=dict, compare=False)


class Environment(ABC):
    """Problems by number, so that data order depends on the seed alone."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """How many problems the split has."""

    @abstractmethod
    def problem(self, split: Split, index: int) -> Problem:
        """Problem number `index` of the split; the same object for the same arguments.

        Raises:
            IndexError: `index` is outside the split.
        """

    @abstractmethod
    def score(self, problem: Problem, response: str) -> float:
        """The reward of a response, in [0, 1]. Never raises for odd text: that text is wrong, so 0."""

    def correct(self, reward: float) -> bool:
        """Whether a reward counts as solved, for accuracy."""
        return reward >= 1.0
