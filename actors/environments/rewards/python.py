"""Rewards of the user's own: a function in TRL's form, a class whose objects are called like one, or the `score` of an environment.

def short(completions, **columns):                 # `answer`, `prompts` and the columns of the row come by name
    return [float(len(text) < 200) for text in completions]
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import WrapperDescriptorType
from typing import Any

from actors.environments.base import Environment, Problem
from actors.environments.rewards.base import Response, Reward
from configs import rewards as configured
from configs.base import ConfigError
from configs.import_path import imported


def load(config: configured.PythonReward) -> Callable[..., Any]:
    """The function or class that the recipe names; nothing of it is called.

    Raises:
        ConfigError: it cannot be imported, or is neither.
    """
    field = f"rewards.{config.label}.import_path"
    found = imported(config.import_path, field)
    if inspect.isclass(found):
        call = next((vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None)
        if call is None or isinstance(call, WrapperDescriptorType):  # the latter: of a class that is not written in Python
            raise ConfigError(f"{field}: objects of the class {config.import_path!r} cannot be called: give it a method __call__")
    elif not inspect.isfunction(found):
        raise ConfigError(f"{field}: {config.import_path!r} is neither a Python function nor a class")
    elif config.options:
        raise ConfigError(f"rewards.{config.label}.options: {config.import_path!r} is a function; only a class is made with options")
    named: Callable[..., Any] = found
    return named


class PythonReward(Reward):
    """Calls it with one completion at a time, sync or async.

    `completions` holds the text; where the prompt is a chat, as in TRL, the reply's messages: [{"role": "assistant", "content": text}].
    `prompts` holds the text or the messages, `answer` the correct answer, `uid` the problem's; the row's columns come by their names, each
    as a list of one. What the function does not name is left out, unless it takes **kwargs.

    Raises:
        ConfigError: see `load`. Exception: of the class's constructor.
    """

    def __init__(self, config: configured.PythonReward) -> None:
        found = load(config)
        self._call: Callable[..., Any] = found(**config.options) if isinstance(found, type) else found
        parameters = inspect.signature(self._call).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {parameter.name for parameter in parameters if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
        self._names = None if takes_all else named
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, problem: Problem, response: Response) -> float | None:
        """
        Raises:
            TypeError: it returned something else than one value in a list. Exception: whatever it raises.
        """
        chat = problem.messages is not None
        given = {name: [value] for name, value in problem.columns.items()} | {
            "completions": [[{"role": "assistant", "content": response.text}] if chat else response.text],
            "prompts": [problem.question if problem.messages is None else [dict(message) for message in problem.messages]],
            "answer": [problem.answer],
            "uid": [problem.uid],
        }
        result = self._call(**{name: value for name, value in given.items() if self._names is None or name in self._names})
        if inspect.isawaitable(result):
            self._loop = self._loop or asyncio.new_event_loop()
            result = self._loop.run_until_complete(result)
        if hasattr(result, "tolist"):  # numpy, torch
            result = result.tolist()
        if not isinstance(result, list | tuple) or len(result) != 1:
            raise TypeError(f"returned {type(result).__name__}, a list with one value for the one completion is wanted")
        return _plain(result[0])


class EnvironmentReward(Reward):
    """`Environment.score`, of an object that lives in the scoring process."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def score(self, problem: Problem, response: Response) -> float | None:
        return _plain(self._environment.score(problem, response.text))

    def reference(self, problem: Problem) -> str | None:
        return problem.answer

    def corrupted(self, problem: Problem) -> str | None:
        return None  # only its author knows what is wrong


def _plain(value: Any) -> float | None:
    plain: float | None = value.item() if hasattr(value, "item") else value  # numpy, torch
    return plain
