"""The verifiers of reasoning_gym's tasks. Some of them evaluate the response as Python: hence `guarded`."""

from __future__ import annotations

import re
from typing import Any

from actors.environments.base import Problem
from actors.environments.reasoning_gym import DATASETS
from actors.environments.rewards.base import Response, Reward
from actors.environments.rewards.guard import guarded
from configs import rewards as configured

# What some verifiers raise at an answer that has not the form they want: a wrong answer, and nothing that is wrong with the verifier.
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError)


class ReasoningGymReward(Reward):
    """What the task's own verifier gives, in [0, 1]; None for problems that are none of reasoning_gym's.

    The column `config`, where there is one, is the configuration of the data set that the problem is from.
    """

    def __init__(self, config: configured.ReasoningGymReward) -> None:
        self._pattern = re.compile(config.answer_pattern) if config.answer_pattern is not None else None
        self._verifiers: dict[str, Any] = {}

    def score(self, problem: Problem, response: Response) -> float | None:
        task = _task(problem)
        if task is None:
            return None
        text = response.text
        if self._pattern is not None:
            matches = [match.group() for match in self._pattern.finditer(text)]
            text = matches[-1] if matches else ""
        # Some verifiers go by the options of the data set: puzzle24 refuses numbers above its largest.
        dataset, kind = DATASETS[task]
        config = problem.columns.get("config")
        config = config if isinstance(config, kind) else kind()
        name = f"{task} {config!r}"
        if name not in self._verifiers:
            self._verifiers[name] = dataset(config=config).score_answer
        with guarded():
            try:
                return float(self._verifiers[name](text.strip(), problem.columns))
            except UNREADABLE:
                return 0.0

    def reference(self, problem: Problem) -> str | None:
        has_one = _task(problem) is not None and problem.columns.get("answer") is not None  # five tasks give none, among them rubiks_cube
        return problem.answer if has_one else None

    def corrupted(self, problem: Problem) -> str | None:
        return None  # many tasks have several right answers


def _task(problem: Problem) -> str | None:
    metadata = problem.columns.get("metadata")
    task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    return task if isinstance(task, str) and task in DATASETS else None
