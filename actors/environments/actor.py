"""The environment as an actor: rewards of responses, away from the collector, so that a slow verifier blocks nobody else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.service import ScoringService
from actors.environments.scoring.verdict import Verdict
from actors.heap import freeze_heap
from configs.environment import EnvironmentConfig
from configs.rewards import AnyReward, ScoringConfig

SCORING_THREADS = 16  # calls that are answered at once; the processes and limits behind them are the same


class EnvironmentActor:
    """Wrapped by `ray.remote` where the run starts its actors. The one process of a run that has the judges' keys.

    Args:
        environment: for rewards of the kind `environment`. keys: of judges, by label.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        rewards: Sequence[AnyReward],
        scoring: ScoringConfig,
        seed: int,
        max_new_tokens: int,
        keys: Mapping[str, str],
    ) -> None:
        self._service = ScoringService(
            rewards, scoring, environment, seed=seed, max_new_tokens=max_new_tokens, path=sys.path, keys=keys
        )  # fmt: skip

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        return self._service.describe()

    def score(self, problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
        """`ScoringService.score`."""
        return self._service.score(problems, responses)

    def metrics(self) -> dict[str, float]:
        """`ScoringService.metrics`."""
        return self._service.metrics()
