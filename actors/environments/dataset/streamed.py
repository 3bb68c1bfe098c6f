"""A data set that is read as it is drawn from: for what memory cannot hold.

files in the epoch's order ──► blocks of `shuffle_buffer` rows, each shuffled ──► next_train(): held-out prompts are passed over

Where a stream stands is the beginning of its block and a place in it: a resumed run draws exactly what the first would have drawn. The
streams of `datasets` serve less here: resumed, they lose the rows of the shuffle buffer; their row numbers change with the order of the
files; and their JSON reader makes dates of text that looks like one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as parquet

from actors.environments.base import Environment, Problem, Split
from actors.environments.dataset.problems import prompt_digest
from actors.environments.dataset.rows import Rows, Table, files, json_lines, of_lines, read_table, reading
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.secrets import resolve


@dataclass(frozen=True)
class _Position:
    """Of the next row to read. `file`: in the epoch's order. `row`: rows (of JSON, lines) of that file before it. `byte`: of JSON lines."""

    file: int = 0
    row: int = 0
    byte: int = 0


class _BlockReader:
    """Reads on from any position. Holds one row group of one Parquet file at a time; of a .json document, the whole."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: Table | None = None
        with reading(path, "environment.path"):
            self.files = files(path, "environment.path")

    def read(self, order: list[int], position: _Position, count: int) -> tuple[Rows, _Position]:
        """The next `count` rows in this order of the files, fewer only at the end of the last one, and where they end."""
        tables: list[Table] = []
        while count and position.file < len(order):
            name, label = self.files[order[position.file]]
            with reading(name, "environment.path"):
                table, position = self._part(name, label, position, count)
            if len(table):
                tables.append(table)
            count -= len(table)
        return Rows(tables), position

    def _part(self, name: str, label: str, position: _Position, count: int) -> tuple[Table, _Position]:
        suffix = PurePosixPath(name).suffix
        if suffix == ".jsonl":
            return _lines(name, label, position, count)
        table = self._kept
        if table is None or table.name != name or (suffix == ".parquet" and not 0 <= position.row - table.first < len(table)):
            table = _row_group(name, label, position.row) if suffix == ".parquet" else read_table(name, label)
        if position.row >= table.first + len(table):
            return Table(name, label, []), _Position(position.file + 1)
        self._kept = table
        part = table.part(position.row - table.first, count)
        return part, _Position(position.file, position.row + len(part))


def _row_group(name: str, label: str, row: int) -> Table:
    """The row group of a Parquet file that has row number `row`; nothing when the file ends before it."""
    with fsspec.open(resolve(name, label), "rb") as opened:
        file = parquet.ParquetFile(opened)
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row < first + rows:
                return Table(name, label, file.read_row_group(group), first=first)
            first += rows
    return Table(name, label, [])


def _lines(name: str, label: str, position: _Position, count: int) -> tuple[Table, _Position]:
    found: list[tuple[int, bytes]] = []
    with fsspec.open(resolve(name, label), "rb") as file:
        file.seek(position.byte)
        for number, line in json_lines(file, before=position.row):
            found.append((number, line))
            if len(found) == count:
                return of_lines(name, label, found), _Position(position.file, number, file.tell())
    return of_lines(name, label, found), _Position(position.file + 1)


class StreamedDataset(Environment):
    """Every epoch has the files in another order, and the rows of each block in another. Repeated prompts are not looked for: what was seen
    would have to be held in memory.

    Raises:
        ConfigError: as `DatasetEnvironment`; of training rows, when they are drawn.
    """

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        assert config.path is not None  # EnvironmentConfig checks both
        assert config.validation_path is not None
        self._fields, self._path, self._seed, self._size = config.fields, config.path, seed, config.shuffle_buffer
        rows = Rows.read(config.validation_path, "environment.validation_path")
        self._validation = [rows.problem(index, self._fields) for index in range(min(config.validation_size, len(rows)))]
        self._held_out = {prompt_digest(one) for one in self._validation}
        self._reader = _BlockReader(config.path)
        labels = "\n".join(label for _, label in self._reader.files)
        self._files = hashlib.sha256(labels.encode()).hexdigest()
        self._passed = 0
        self._load(0, 0, _Position())

    def size(self, split: Split) -> int:
        """Of training rows it is not known before they are read: 1 stands for "not empty"."""
        return len(self._validation) if split == "validation" else 1

    def problem(self, split: Split, index: int) -> Problem:
        """Validation problems; of training ones the first row alone, which shows what the rows are like."""
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} problem {index} of {self.size(split)}")
        if split == "validation":
            return self._validation[index]
        first, _ = self._reader.read(list(range(len(self._reader.files))), _Position(), 1)
        if not len(first):
            raise ConfigError(f"environment.path: {self._path} is empty: no rows to read")
        return first.problem(0, self._fields)

    def next_train(self) -> Problem:
        """The next training problem that is not held out.

        Raises:
            ConfigError: a damaged row, or an epoch without one that is not held out.
        """
        fresh = False
        while True:
            if self._drawn < len(self._block):
                found = self._block.problem(int(self._shuffled[self._drawn]), self._fields)
                self._drawn += 1
                if prompt_digest(found) not in self._held_out:
                    return found
                self._passed += 1
            elif self._end.file < len(self._order):
                self._load(self._epoch, self._number + 1, self._end)
            elif fresh:
                raise ConfigError(f"environment.path: {self._path} has no row that is not held out: nothing to train on")
            else:
                fresh = True
                self._load(self._epoch + 1, 0, _Position())

    def stream_state(self) -> dict[str, Any]:
        """Where it stands; JSON. `passed`: rows passed over so far because they are held out."""
        return {
            "files": self._files,
            "shuffle_buffer": self._size,
            "epoch": self._epoch,
            "block": self._number,
            "begins": asdict(self._begin),
            "drawn": self._drawn,
            "passed": self._passed,
        }

    def restore_stream(self, state: Mapping[str, Any]) -> None:
        """Go on with the problem after the last one that was drawn when the state was taken.

        Raises:
            ConfigError: the files at the path have other names now, or the blocks another size.
        """
        if (state["files"], state["shuffle_buffer"]) != (self._files, self._size):
            raise ConfigError(
                f"environment.path: the run to resume read other files than those at {self._path}, or with another shuffle_buffer: "
                "resume with the data and the setting that it began with"
            )
        self._passed = state["passed"]
        self._load(state["epoch"], state["block"], _Position(**state["begins"]), state["drawn"])

    def _load(self, epoch: int, number: int, begin: _Position, drawn: int = 0) -> None:
        self._epoch, self._number, self._begin, self._drawn = epoch, number, begin, drawn
        self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._reader.files)).tolist()
        self._block, self._end = self._reader.read(self._order, begin, self._size)
        self._shuffled = np.random.default_rng((self._seed, epoch, number)).permutation(len(self._block))
