"""From the recipe's `rewards` to objects. The module of a kind is imported when a recipe has that kind: some take seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from actors.environments.base import Environment
from actors.environments.rewards.base import Reward
from actors.environments.rewards.python import load
from configs import rewards as configured
from configs.base import ConfigError

_ROOM = "actors.environments.rewards"
_CLASSES = {
    "exact": "text:ExactReward", "regex": "text:RegexReward", "length": "text:LengthReward", "json_schema": "json_schema:JsonSchemaReward",
    "math": "math:MathReward", "reasoning_gym": "reasoning_gym:ReasoningGymReward",
    "python": "python:PythonReward", "environment": "python:EnvironmentReward",
}  # fmt: skip


def import_rewards(rewards: Sequence[configured.AnyReward]) -> None:
    """Import what they need, users' modules included, so that processes forked after this have it.

    Raises:
        ConfigError: a `python` reward that cannot be imported.
    """
    for reward in rewards:
        if reward.kind in _CLASSES:
            _class(reward.kind)
        if isinstance(reward, configured.PythonReward):
            load(reward)


def build_rewards(rewards: Sequence[configured.AnyReward], *, max_new_tokens: int, environment: Environment | None) -> dict[str, Reward]:
    """Rewards by label, without judges: those are asked outside the scoring processes.

    Args:
        environment: the object whose `score` the kind `environment` calls.

    Raises:
        ConfigError: one that cannot be made.
    """
    judged = configured.JudgeReward
    return {reward.label: _build(reward, max_new_tokens, environment) for reward in rewards if not isinstance(reward, judged)}


def _build(reward: configured.AnyReward, max_new_tokens: int, environment: Environment | None) -> Reward:
    make: Callable[..., Reward] = _class(reward.kind)
    if reward.kind == "environment":
        if environment is None or type(environment).score is Environment.score:
            raise ConfigError(f"rewards.{reward.label}: kind 'environment' needs an environment with a `score`; choose another kind")
        return make(environment)
    if reward.kind == "length":
        return make(reward, max_new_tokens)
    return make() if reward.kind == "math" else make(reward)


def _class(kind: str) -> Any:
    module, _, name = _CLASSES[kind].partition(":")
    return getattr(importlib.import_module(f"{_ROOM}.{module}"), name)
