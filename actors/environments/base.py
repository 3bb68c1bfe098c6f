"""What an environment is: numbered problems; what their answers are worth is said by rewards (actors/environments/rewards).

A class of your own derives from `Environment` and is named in a recipe:

    environment: {kind: python, import_path: "my_package.my_module:MyEnvironment", options: {level: 3}}

It lives in a process of its own (hosted.py), and for rewards in the scoring processes: never in the run's own.
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
        uid: source and row; unique within the split.
        question: what the user asks, as text for reports.
        answer: a correct answer, as supervised text and for reports.
        messages: the chat that is sent, {"role", "content"} each; None: `question` as the user's only message.
        columns: the other columns of its row, which rewards may want; must be picklable, and of a class of one's own be plain values:
            text, numbers, dates, None, and lists, sets and mappings of these.
        source: name of the part of a mixture that it comes from; metrics are kept for each.
    """

    uid: str
    question: str
    answer: str
    messages: tuple[dict[str, str], ...] | None = field(default=None, compare=False)
    columns: dict[str, Any] = field(default_factory=dict, compare=False)
    source: str = ""


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

    def score(self, problem: Problem, response: str) -> float | None:
        """What the reward of kind `environment` gives: a finite number, or None for no opinion.

        Called in a scoring process, on an object of its own there, which is lost when the process is killed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `score`: list rewards in the recipe, or give it one")
