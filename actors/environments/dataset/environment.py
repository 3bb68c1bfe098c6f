"""Problems from files: training prompts without what is held out, and each only once."""

from __future__ import annotations

from actors.environments.base import Environment, Problem, Split
from actors.environments.dataset.problems import problem, prompt_digest
from actors.environments.dataset.rows import Rows
from configs.base import ConfigError
from configs.environment import FieldsConfig


class DatasetEnvironment(Environment):
    """The rows at `path`. Without `validation_path` the last `validation_size` different prompts are held out. Where both are the same, all
    rows are in both splits: for evaluation alone.

    Args:
        source: of a mixture; part of uids. field: what the recipe calls `path`, without its last word, for messages.

    Raises:
        ConfigError: what cannot be read or used, by file, line and column; or too few rows.
    """

    def __init__(
        self,
        *,
        path: str,
        validation_path: str | None,
        validation_size: int,
        fields: FieldsConfig,
        source: str = "",
        field: str = "environment",
    ) -> None:
        self._fields, self._source = fields, source
        rows = Rows.read(path, f"{field}.path")
        self._rows: dict[Split, Rows] = {"train": rows}
        firsts: dict[bytes, int] = {}
        for index in range(len(rows)):
            firsts.setdefault(prompt_digest(self._read(rows, index)), index)
        self._duplicates = len(rows) - len(firsts)
        if validation_path:
            held_out = self._rows["validation"] = Rows.read(validation_path, f"{field}.validation_path")
            validation = list(range(len(held_out)))[:validation_size]
            digests = {prompt_digest(self._read(held_out, index)) for index in validation}
        else:
            self._rows["validation"] = rows
            if len(firsts) <= validation_size:
                raise ConfigError(
                    f"{field}.path: {path} has {len(firsts)} different prompts, not more than validation_size = {validation_size}: "
                    "give validation_path, or lower validation_size"
                )
            last = list(firsts.items())[-validation_size:]
            validation, digests = [index for _, index in last], {digest for digest, _ in last}
        only_validated = path == validation_path  # a frozen set, of a model that is not trained
        train = [index for digest, index in firsts.items() if only_validated or digest not in digests]
        self._held_out = len(firsts) - len(train)
        if not train:
            raise ConfigError(f"{field}.path: every prompt of {path} is held out for validation: nothing is left to train on")
        self._numbers: dict[Split, list[int]] = {"train": train, "validation": validation}

    def size(self, split: Split) -> int:
        return len(self._numbers[split])

    def problem(self, split: Split, index: int) -> Problem:
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} problem {index} of {self.size(split)}")
        return self._read(self._rows[split], self._numbers[split][index])

    def counts(self) -> dict[str, int]:
        """Rows that are not trained on: duplicates of earlier ones, and prompts that are held out."""
        return {"duplicates": self._duplicates, "held_out": self._held_out}

    def _read(self, rows: Rows, index: int) -> Problem:
        table, number = rows.find(index)
        return problem(table.row(number), self._fields, uid=table.uid(number), place=table.place(number), source=self._source)
