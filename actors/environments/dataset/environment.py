"""Problems from files: training prompts without what is held out, and each only once."""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from actors.environments.base import Environment, Problem, Split
from actors.environments.dataset.problems import problem, prompt_digest
from actors.environments.dataset.rows import Rows
from configs.base import ConfigError
from configs.environment import EnvironmentConfig, SourceConfig


class DatasetEnvironment(Environment):
    """The rows at `path`. Without `validation_path` the last `validation_size` different prompts are held out. Where both are the same, all
    rows are in both splits: for evaluation alone.

    Args:
        field: name of the block that has `path` in the recipe, for messages.

    Attributes:
        train_digests: `prompt_digest` of every training prompt, in their order.

    Raises:
        ConfigError: what cannot be read or used, by file, line and column; or too few rows.
    """

    def __init__(self, config: EnvironmentConfig | SourceConfig, field: str = "environment") -> None:
        assert config.path is not None  # both configurations check it
        path, validation_path, validation_size = config.path, config.validation_path, config.validation_size
        self._path, self._fields, self._field = path, config.fields, field
        rows = Rows.read(path, f"{field}.path")
        self._rows: dict[Split, Rows] = {"train": rows, "validation": rows}
        firsts: dict[bytes, int] = {}
        for index, digest in enumerate(self._digests(rows)):
            firsts.setdefault(digest, index)
        if validation_path:
            only_validated = path == validation_path  # a frozen set, of a model that is not trained
            held_out = self._rows["validation"] = rows if only_validated else Rows.read(validation_path, f"{field}.validation_path")
            validation = list(range(min(validation_size, len(held_out))))
            digests = set() if only_validated else {prompt_digest(held_out.problem(index, self._fields, field)) for index in validation}
        else:
            if len(firsts) <= validation_size:
                raise ConfigError(
                    f"{field}.path: {path} has {len(firsts)} different prompts, not more than validation_size = {validation_size}: "
                    "give validation_path, or lower validation_size"
                )
            last = list(firsts.items())[-validation_size:]
            validation, digests = [index for _, index in last], {digest for digest, _ in last}
        self._numbers: dict[Split, np.ndarray] = {"train": np.array(list(firsts.values())), "validation": np.array(validation)}
        self.train_digests = list(firsts)
        self.leave_out(digests)

    def size(self, split: Split) -> int:
        return len(self._numbers[split])

    def problem(self, split: Split, index: int) -> Problem:
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} problem {index} of {self.size(split)}")
        return self._rows[split].problem(int(self._numbers[split][index]), self._fields, self._field)

    def leave_out(self, held_out: Container[bytes], elsewhere: Container[bytes] = ()) -> None:
        """Take prompts out of training before the first is drawn.

        Args:
            held_out: digests of the prompts to validate with. elsewhere: digests of those that an earlier source of a mixture has.

        Raises:
            ConfigError: nothing is left.
        """
        kept = np.array([digest not in held_out and digest not in elsewhere for digest in self.train_digests])
        if not kept.any():
            raise ConfigError(
                f"{self._field}.path: every prompt of {self._path} is held out for validation, or stands in an earlier source: "
                "nothing is left to train on"
            )
        self._numbers["train"] = self._numbers["train"][kept]
        self.train_digests = [digest for digest, keep in zip(self.train_digests, kept, strict=True) if keep]

    def _digests(self, rows: Rows) -> Iterator[bytes]:
        for table in rows.tables:
            for number, row in enumerate(table.each()):
                yield prompt_digest(problem(row, self._fields, uid="", place=table.place(number), field=self._field))
