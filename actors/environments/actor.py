"""The environment as an actor: scores responses away from the collector, so that a slow verifier blocks nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from actors.environments import Environment, Problem, build
from actors.heap import freeze_heap
from configs.environment import EnvironmentConfig


class EnvironmentActor:
    """Wrapped by `ray.remote` where the run starts its actors."""

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        self._environment: Environment = build(config, seed)

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        sizes = {split: self._environment.size(split) for split in ("train", "validation")}
        return f"{sizes['train']} train and {sizes['validation']} validation problems"

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """One reward per (problem, response) pair."""
        return [self._environment.score(problem, response) for problem, response in zip(problems, responses, strict=True)]
