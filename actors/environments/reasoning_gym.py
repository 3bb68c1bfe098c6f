"""reasoning_gym's procedural tasks: over a hundred generators, many of them with levels of difficulty.

validation  task_options, a seed of its own ──────────────────► problems 0, 1, ...      always the same
train       task_options, or a level of the task's curriculum ──► problems 0, 1, ...    without the validation questions
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import warnings
from collections.abc import Iterable
from typing import Any

from actors.environments.base import Environment, Problem, Split
from actors.unused import without
from configs.base import ConfigError, did_you_mean
from configs.curriculum import CurriculumConfig
from configs.environment import EnvironmentConfig, SourceConfig

# cellpylib, which reasoning_gym has for the game of life, could plot.
_PLOTS = ("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections", "mpl_toolkits", "mpl_toolkits.mplot3d")

with warnings.catch_warnings(), without(*_PLOTS):
    warnings.simplefilter("ignore", SyntaxWarning)  # a dependency of reasoning_gym compares with `is`
    import reasoning_gym
    from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum

__all__ = ["DATASETS", "ReasoningGymEnvironment"]

_VALIDATION_SEED = 1_000_003  # far from train seeds: the two splits draw from different random streams
_HOPS = 64  # numbers tried for one problem

_log = logging.getLogger(__name__)


class ReasoningGymEnvironment(Environment):
    """Train problems come from `seed`; validation problems from a seed of their own, and are kept out of training.

    Raises:
        ConfigError: no such task or options, or a curriculum that does not fit the task.
    """

    def __init__(self, config: EnvironmentConfig | SourceConfig, seed: int) -> None:
        task, options, train_size, validation_size = config.task, config.task_options, config.train_size, config.validation_size
        curriculum = config.curriculum if isinstance(config, EnvironmentConfig) else None  # a source of a mixture has none
        assert task is not None  # SourceConfig checks it
        if task not in DATASETS:
            raise ConfigError(f"environment.task: reasoning_gym has no task {task!r}; near it: {_near(task, DATASETS)}")
        names = [field.name for field in dataclasses.fields(DATASETS[task][1])]
        if unknown := [name for name in options if name not in names]:
            hint = did_you_mean(unknown[0], names, f"it has {', '.join(names)}")
            raise ConfigError(f"environment.task_options: reasoning_gym's {task!r} has no option {unknown[0]!r}; {hint}")
        # Twice the train size in numbers: those that repeat a validation question are passed over.
        self._task, self._options = task, options | {"seed": seed, "size": 2 * train_size}
        try:
            self._train = {0: reasoning_gym.create_dataset(task, **self._options)} if curriculum is None else {}
            self._validation = reasoning_gym.create_dataset(task, **options | {"seed": seed + _VALIDATION_SEED, "size": validation_size})
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"environment.task_options do not fit reasoning_gym's {task!r}: {error}") from None
        self._ladder = None if curriculum is None else Ladder(task, self._options, curriculum)
        self._start = 0 if curriculum is None else curriculum.start_level
        self._sizes = {"train": train_size, "validation": validation_size}
        self._warned: set[int] = set()  # levels at which a problem could not be made, and it was said
        self._held_out = {self._validation_entry(index)["question"] for index in range(validation_size)}

    @property
    def levels(self) -> int:
        """How many levels of difficulty the training problems have; 1 without a curriculum."""
        return 1 if self._ladder is None else self._ladder.levels

    def size(self, split: Split) -> int:
        return self._sizes[split]

    def problem(self, split: Split, index: int) -> Problem:
        """Problem number `index`; with a curriculum, training problems are of the level that training begins with.

        Raises:
            IndexError: `index` is outside the split. ConfigError: the task can ask nothing that is not held out.
        """
        return self.problem_at(self._start, split, index)

    def problem_at(self, level: int, split: Split, index: int) -> Problem:
        """Problem number `index` at a level of difficulty. Validation problems have none: they are the same at every level.

        Raises:
            IndexError: `index` is outside the split, or there is no such level. ConfigError: as `problem`.
        """
        if not 0 <= index < self._sizes[split]:
            raise IndexError(f"{split} problem {index} of {self._sizes[split]}")
        if not 0 <= level < self.levels:
            raise IndexError(f"level {level} of {self.levels}")
        held_out = split == "validation"
        entry = self._validation_entry(index) if held_out else self._train_entry(level, index)
        columns = entry | {"config": (self._validation if held_out else self._dataset(level)).config}  # the verifier wants it
        uid = f"{split[0]}{index}" if self._ladder is None or split == "validation" else f"{split[0]}{index}.level{level}"
        return Problem(uid=uid, question=entry["question"], answer=str(entry["answer"]), columns=columns, source=self._task)

    def _validation_entry(self, index: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._validation[index]
        except Exception as error:
            raise ConfigError(
                f"environment: reasoning_gym's {self._task!r} cannot make validation problem {index}: {type(error).__name__}: {error}: "
                "change environment.task_options"
            ) from error
        return entry

    def _train_entry(self, level: int, index: int) -> dict[str, Any]:
        dataset = self._dataset(level)
        # Walk over numbers that no other index starts from, so that a held-out question is never trained on.
        size, failed = self._sizes["train"], ""
        for hop in range(_HOPS):
            number = index if hop == 0 else size + (index * _HOPS + hop) % size
            try:
                entry: dict[str, Any] = dataset[number]
            except Exception as error:  # noqa: BLE001  (some generators fail at some numbers: no reason to end a run)
                failed = f"{type(error).__name__}: {error}"
                if level not in self._warned:
                    self._warned.add(level)
                    _log.warning("reasoning_gym's %s, level %d: problems that it fails to make are replaced: %s", self._task, level, failed)
                continue
            if entry["question"] not in self._held_out:
                return entry
        if failed:
            raise ConfigError(
                f"environment: reasoning_gym's {self._task!r} makes no problem at level {level}: {failed}: "
                "change environment.task_options, or set environment.curriculum.max_level below it"
            )
        raise ConfigError(
            "environment: the validation set holds nearly every question that this task can ask, so nothing is left to train on: "
            "lower environment.validation_size or widen environment.task_options"
        )

    def _dataset(self, level: int) -> Any:
        if level not in self._train:
            assert self._ladder is not None  # without one, level 0 was made at the start
            self._train[level] = DATASETS[self._task][0](config=self._ladder.configuration(level))
        return self._train[level]


class Ladder:
    """The levels of a task, as reasoning_gym's own curriculum for it defines them.

    At level n every raised attribute has its n-th value (its last one, if it has fewer). An attribute that is a range reaches from its
    easiest to its n-th value, so that a harder level holds the easier ones (reasoning_gym.coaching: RangeAttributeMode.INCLUSIVE).

    Args:
        options: of the data set, `seed` and `size` included; those that belong to a raised attribute are replaced.

    Raises:
        ConfigError: the task has no curriculum, not this attribute, or a level that its own generator refuses (caesar_cipher has such).
    """

    def __init__(self, task: str, options: dict[str, Any], config: CurriculumConfig) -> None:
        if not has_curriculum(task):
            raise ConfigError(f"environment.curriculum: reasoning_gym has no curriculum for {task!r}: leave it out")
        self._options, self._curriculum = options, create_curriculum(task)
        attributes = self._curriculum.attributes
        for name in config.attributes:
            if name not in attributes:
                raise ConfigError(
                    f"environment.curriculum.attributes: {task!r} has no {name!r}; near it: {_near(name, attributes)}; "
                    f"it has {', '.join(attributes)}"
                )
        for name in set(attributes) - set(config.attributes or attributes):
            del attributes[name]  # so that generate_configuration leaves the options of this attribute alone
        self.levels = max(len(attribute.levels) for attribute in attributes.values())
        top = self.levels - 1 if config.max_level is None else min(config.max_level, self.levels - 1)
        for level in range(0 if config.lower_at is not None else config.start_level, top + 1):
            try:
                configuration = self.configuration(level)
                if hasattr(configuration, "validate"):  # two tasks have none
                    configuration.validate()
            except (TypeError, AssertionError, ValueError) as error:
                raise ConfigError(
                    f"environment.curriculum: level {level} of reasoning_gym's {task!r} is one that its generator refuses: {error}: "
                    "keep away from it with max_level, with start_level and lower_at=null, or by naming other attributes"
                ) from None

    def configuration(self, level: int) -> Any:
        """Of the task's data set at this level."""
        self._curriculum.set_global_level(level)
        return self._curriculum.generate_configuration(self._options)


def _near(name: str, names: Iterable[str]) -> str:
    return ", ".join(difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)) or "none"
