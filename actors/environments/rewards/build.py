"""From the recipe's `rewards` to objects. Each kind's module is imported when it is wanted: some take seconds."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from actors.environments.base import Environment
from actors.environments.rewards.base import Reward
from configs import rewards as configured
from configs.base import ConfigError

_ROOM = "actors.environments.rewards"
_MODULES = {
    "exact": "text", "regex": "text", "length": "text", "json_schema": "json_schema", "math": "math", "reasoning_gym": "reasoning_gym",
    "python": "python", "environment": "environment",
}  # fmt: skip


def import_rewards(rewards: Sequence[configured.AnyReward]) -> None:
    """Import what they need, users' modules included, so that processes forked after this have it.

    Raises:
        ConfigError: a `python` reward that cannot be imported.
    """
    for reward in rewards:
        if reward.kind in _MODULES:
            importlib.import_module(f"{_ROOM}.{_MODULES[reward.kind]}")
        if isinstance(reward, configured.PythonReward):
            from actors.environments.rewards.python import load

            load(reward)


def build_rewards(rewards: Sequence[configured.AnyReward], *, max_new_tokens: int, environment: Environment | None) -> dict[str, Reward]:
    """Rewards by label, but for judges, which are no rewards of a scoring process.

    Args:
        environment: whose `score` is meant by the kind `environment`.

    Raises:
        ConfigError: one that cannot be made.
    """
    judged = configured.JudgeReward
    return {reward.label: _build(reward, max_new_tokens, environment) for reward in rewards if not isinstance(reward, judged)}


def _build(reward: configured.AnyReward, max_new_tokens: int, environment: Environment | None) -> Reward:
    match reward:
        case configured.ExactReward() | configured.RegexReward() | configured.LengthReward():
            from actors.environments.rewards import text

            if isinstance(reward, configured.LengthReward):
                return text.LengthReward(reward, max_new_tokens)
            return text.ExactReward(reward) if isinstance(reward, configured.ExactReward) else text.RegexReward(reward)
        case configured.JsonSchemaReward():
            from actors.environments.rewards.json_schema import JsonSchemaReward

            return JsonSchemaReward(reward)
        case configured.MathReward():
            from actors.environments.rewards.math import MathReward

            return MathReward()
        case configured.ReasoningGymReward():
            from actors.environments.rewards.reasoning_gym import ReasoningGymReward

            return ReasoningGymReward(reward)
        case configured.PythonReward():
            from actors.environments.rewards.python import PythonReward

            return PythonReward(reward)
        case configured.EnvironmentReward() if environment is not None and type(environment).score is not Environment.score:
            from actors.environments.rewards.environment import EnvironmentReward

            return EnvironmentReward(environment)
    raise ConfigError(f"rewards.{reward.label}: kind {reward.kind!r} needs an environment with a `score`; choose another kind")
