"""Rewards as users write them, right and wrong: for the tests of the kind `python`."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONSTANT = 3
ALIAS = len


def short(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text) < 5) for text in completions]


def echo(completions: list[Any], prompts: list[Any], answer: list[str], uid: list[str]) -> list[float]:
    """1 when everything is as `PythonReward` promises for the test's problem."""
    return [float((completions, prompts, answer, uid) == (["said"], ["What?"], ["yes"], ["p:1"]))]


def chat(completions: list[Any], prompts: list[Any]) -> list[float]:
    reply = [[{"role": "assistant", "content": "said"}]]
    return [float(completions == reply and prompts == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]])]


def by_name(completions: list[str], level: list[int]) -> list[float]:
    return [float(level[0])]


def everything(**given: list[Any]) -> list[float]:
    return [float(len(given))]


def spoil(prompts: list[Any], **_: object) -> list[float]:
    prompts[0][0]["content"] = "spoiled"
    return [1.0]


async def later(completions: list[str], **_: object) -> list[float]:
    await asyncio.sleep(0)
    return [0.5]


VALUES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array([0.25]),
    "float32": lambda: [np.float32(0.25)],
    "int64": lambda: [np.int64(2)],
    "bool": lambda: [np.bool_(True)],
    "tuple": lambda: (1.5,),
    "opinionless": lambda: [None],
    "bare": lambda: 1.0,
    "nothing": lambda: None,
    "empty": list,
    "two": lambda: [1.0, 2.0],
    "text": lambda: "1",
    "bytes": lambda: b"\x01",
    "scalar": lambda: np.float64(1.0),
    "mapping": lambda: {0: 1.0},
    "vector": lambda: [np.array([1.0, 2.0])],
}


def value_of(completions: list[str], **_: object) -> Any:
    return VALUES[completions[0]]()


class Weighted:
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [self.weight * len(text) for text in completions]


class WeightedLater(Weighted):
    async def __call__(self, completions: list[str], **_: object) -> list[float]:  # type: ignore[override]
        return super().__call__(completions)


class Starred:
    """A column may be called as what takes no keyword is."""

    def __call__(self, completions: list[str], *level: object) -> list[float]:
        return [float(len(level))]


class Uncallable:
    def __init__(self, mark: str = "") -> None:
        Path(mark).touch()  # must never happen
