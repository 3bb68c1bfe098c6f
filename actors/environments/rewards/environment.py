"""The reward that an environment of the user's own brings along."""

from __future__ import annotations

from typing import Any

from actors.environments.base import Environment, Problem
from actors.environments.rewards.base import Response, Reward


class EnvironmentReward(Reward):
    """`Environment.score`, of an object that lives in the scoring process."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def score(self, problem: Problem, response: Response) -> float | None:
        value: Any = self._environment.score(problem, response.text)
        plain: float | None = value.item() if hasattr(value, "item") else value  # numpy, torch
        return plain

    def corrupted(self, problem: Problem) -> str | None:
        return None  # only its author knows what is wrong
