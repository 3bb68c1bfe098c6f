"""A data set that is read as it is drawn from, through `datasets`: for what memory cannot hold.

files ──► IterableDataset.shuffle(seed, buffer) ──► next_train(): held-out and repeated prompts are passed over, epoch after epoch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.environments.base import Environment, Problem, Split
from actors.environments.dataset.problems import problem, prompt_digest
from actors.environments.dataset.rows import Rows, files
from configs.base import ConfigError
from configs.environment import FieldsConfig

_ROW = "__row__"


class StreamedDataset(Environment):
    """Rows in the order of a shuffle buffer; a row's number is that within its epoch's file order.

    Raises:
        ConfigError: as `DatasetEnvironment`; of training rows, when they are drawn.
    """

    def __init__(
        self, *, path: str, validation_path: str, validation_size: int, fields: FieldsConfig, seed: int, shuffle_buffer: int
    ) -> None:
        self._fields, self._path, self._seed = fields, path, seed
        rows = Rows.read(validation_path, "environment.validation_path")
        self._validation = [_read(rows, index, fields) for index in range(min(validation_size, len(rows)))]
        self._held_out = {prompt_digest(one) for one in self._validation}
        self._passed = 0
        self._data = _open(path).shuffle(seed=seed, buffer_size=shuffle_buffer)
        self._epoch = 0
        self._rows: Iterator[dict[str, Any]] = iter(self._data)

    def size(self, split: Split) -> int:
        """Of training rows it is not known before they are read: 1 stands for "not empty"."""
        return len(self._validation) if split == "validation" else 1

    def problem(self, split: Split, index: int) -> Problem:
        """Validation problems; of training ones the first row alone, which shows what the rows are like."""
        if split == "train":
            return self._problem(next(iter(_open(self._path))))
        return self._validation[index]

    def next_train(self) -> Problem:
        """The next training problem that is not held out.

        Raises:
            ConfigError: a damaged row, or an epoch without one that is not held out.
        """
        fresh = False
        while True:
            row = next(self._rows, None)
            if row is None:
                if fresh:
                    raise ConfigError(f"environment.path: {self._path} has no row that is not held out: nothing to train on")
                self._epoch, fresh = self._epoch + 1, True
                self._data.set_epoch(self._epoch)
                self._rows = iter(self._data)
                continue
            found = self._problem(row)
            if prompt_digest(found) not in self._held_out:
                return found
            self._passed += 1

    def counts(self) -> dict[str, int]:
        """Rows passed over so far because they are held out."""
        return {"held_out": self._passed}

    def stream_state(self) -> dict[str, Any]:
        """Where it stands; JSON."""
        return {"epoch": self._epoch, "passed": self._passed, "rows": self._data.state_dict()}

    def restore_stream(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken. Rows that were in the shuffle buffer then are lost to this epoch (a limit of `datasets`)."""
        self._epoch, self._passed = state["epoch"], state["passed"]
        self._data.set_epoch(self._epoch)
        self._data.load_state_dict(state["rows"])
        self._rows = iter(self._data)

    def _problem(self, row: dict[str, Any]) -> Problem:
        number = row.pop(_ROW)
        return problem(row, self._fields, uid=f"row:{number + 1}", place=f"{self._path}, row {number + 1}")


def _read(rows: Rows, index: int, fields: FieldsConfig) -> Problem:
    table, number = rows.find(index)
    return problem(table.row(number), fields, uid=table.uid(number), place=table.place(number))


def _open(path: str) -> Any:
    import datasets

    names = files(path, "environment.path")
    kind = "parquet" if names[0].endswith(".parquet") else "json"
    try:
        rows = datasets.load_dataset(kind, data_files={"train": names}, split="train", streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"environment.path: cannot read {path}: {error}") from None
    return rows.map(lambda row, number: {**row, _ROW: number}, with_indices=True)
