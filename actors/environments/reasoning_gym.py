"""reasoning_gym's procedural tasks: over a hundred generators, each with its verifier."""

from __future__ import annotations

import difflib
import re
import warnings
from typing import Any

from actors.environments.base import Environment, Problem, Split
from configs.base import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # a dependency of reasoning_gym compares with `is`
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

_VALIDATION_SEED = 1_000_003  # far from train seeds: the two splits draw from different random streams


class ReasoningGymEnvironment(Environment):
    """Train problems come from `seed`; validation problems from a seed of their own, and are kept out of training."""

    def __init__(
        self, *, task: str, options: dict[str, Any], seed: int, train_size: int, validation_size: int, answer_pattern: str | None
    ) -> None:
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
            raise ConfigError(f"environment.task: reasoning_gym has no task {task!r}; near it: {', '.join(near) or 'none'}")
        try:
            # Twice the train size in numbers: those that repeat a validation question are passed over.
            self._train = reasoning_gym.create_dataset(task, seed=seed, size=2 * train_size, **options)
            self._validation = reasoning_gym.create_dataset(task, seed=seed + _VALIDATION_SEED, size=validation_size, **options)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"environment.task_options do not fit reasoning_gym's {task!r}: {error}") from None
        self._pattern = re.compile(answer_pattern) if answer_pattern is not None else None
        self._sizes = {"train": train_size, "validation": validation_size}
        self._held_out = {self._validation[i]["question"] for i in range(validation_size)}

    def size(self, split: Split) -> int:
        return self._sizes[split]

    def problem(self, split: Split, index: int) -> Problem:
        if not 0 <= index < self._sizes[split]:
            raise IndexError(f"{split} problem {index} of {self._sizes[split]}")
        entry = self._validation[index] if split == "validation" else self._train_entry(index)
        return Problem(uid=f"{split[0]}{index}", question=entry["question"], answer=str(entry["answer"]), payload=entry)

    def _train_entry(self, index: int) -> dict[str, Any]:
        # Walk over numbers that no other index starts from, so that a held-out question is never trained on.
        size = self._sizes["train"]
        for hop in range(64):
            entry = self._train[index if hop == 0 else size + (index * 64 + hop) % size]
            if entry["question"] not in self._held_out:
                return entry
        raise ConfigError(
            "environment: the validation set holds nearly every question that this task can ask, so nothing is left to train on: "
            "lower environment.validation_size or widen environment.task_options"
        )

    def score(self, problem: Problem, response: str) -> float:
        if self._pattern is not None:
            matches = [match.group() for match in self._pattern.finditer(response)]
            response = matches[-1] if matches else ""
        return float(self._train.score_answer(response.strip(), problem.payload))
