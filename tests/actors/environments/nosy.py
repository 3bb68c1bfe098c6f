"""An environment that looks around, and ones that do what nobody expects."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from actors.environments import Environment, Problem, Split

IMPORTED_BY = os.getpid()


class Nosy(Environment):
    """Problem 0 has the environment of its process; others do what `column` says."""

    def __init__(self, column: str = "", word: str = "") -> None:
        self._column, self._word = column, word
        self._drawn = 0

    levels = 3

    def size(self, split: Split) -> int:
        return 5

    def problem(self, split: Split, index: int) -> Problem:
        if index == 4:
            raise IndexError("no problem 4")
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:
            raise KeyError("what")
        if index == 1:
            return Problem("1", "?", "", columns={"x": {"ours": Nosy(), "lock": threading.Lock()}[self._column]})
        environment, word = dict(os.environ), self._word
        return Problem("0", "?", word, columns={"environment": environment, "pid": os.getpid(), "shape": (1, {2, 3})})

    def problem_at(self, level: int, split: Split, index: int) -> Problem:
        return Problem(f"{index}.{level}", "?", "")


class Stream(Environment):
    """Counts."""

    def __init__(self) -> None:
        self._drawn = 0

    def size(self, split: Split) -> int:
        return 5

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(str(index), "?", "")

    def next_train(self) -> Problem:
        self._drawn += 1
        return Problem(str(self._drawn), "?", "")

    def stream_state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def restore_stream(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]


class Slow(Environment):
    """Never answers."""

    def size(self, split: Split) -> int:
        return 5

    def problem(self, split: Split, index: int) -> Problem:
        time.sleep(600)
        raise AssertionError


class Raising(Slow):
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("not today")
