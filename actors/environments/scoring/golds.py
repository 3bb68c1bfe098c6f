"""Before a model starts: every answer of the data counts as right by its own reward, and a corrupted one does not.

problems ──► ScoringPool of GoldCheck, which wraps the success reward ──► one ConfigError that names the first lines, or nothing
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.pool import ScoringPool
from actors.environments.scoring.zygote import Start
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.rewards import AnyReward, JudgeReward, ScoringConfig

_SHOWN = 5


def check_golds(problems: Sequence[Problem], rewards: Sequence[AnyReward], config: ScoringConfig, environment: EnvironmentConfig) -> None:
    """Every answer that can be checked is right by the success reward; of a judge none can.

    An answer that timed out is checked once more: a process's first one waits for what the verifier imports at its first use.

    Raises:
        ConfigError: answers that are not right by their own reward, the first of them by source and row.
    """
    reward = next((reward for reward in rewards if reward.label == config.success), rewards[0])
    if isinstance(reward, JudgeReward) or not problems:
        return
    # The batch's time includes the start of the processes.
    patient = config.model_copy(update={"batch_timeout_s": max(config.batch_timeout_s, reward.timeout_s * len(problems))})
    start = Start(tuple(sys.path), (reward,), environment, max_new_tokens=1, config=patient, golds=True)
    with ScoringPool(start) as pool:
        calls = [(reward.label, problem, Response("", 0, False)) for problem in problems]
        parts = pool.score(calls)
        timed_out = [index for index, part in enumerate(parts) if part.outcome == "timed_out"]
        for index, part in zip(timed_out, pool.score([calls[index] for index in timed_out]), strict=True):
            parts[index] = part
    wrong = [(problem, part) for problem, part in zip(problems, parts, strict=True) if part.outcome != "scored"]
    if wrong:
        lines = "; ".join(f"{problem.uid}: {part.error.removeprefix('ValueError: ')}" for problem, part in wrong[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"rewards.{reward.label}: {len(wrong)} of {len(problems)} answers in the data cannot be used with this reward: {lines}{more}. "
            "Correct or remove them, or choose another reward (scoring.success)"
        )
