"""The rows of data sets, wherever they lie: files of JSON lines, Parquet, and folders that `datasets` wrote.

    path ──► files ──► one table each ──► row(i): a mapping, and where it stands: "train.jsonl:17", as a person counts

A table stays in Arrow's memory; only the row that is asked for becomes Python objects.
"""

from __future__ import annotations

import bisect
import codecs
import io
import itertools
import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet as parquet

from actors.environments.base import Problem
from actors.environments.dataset.problems import problem
from actors.storage import harmless, reason
from configs.base import ConfigError
from configs.environment import FieldsConfig
from configs.redaction import hidden
from configs.secrets import resolve

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # of folders that save_to_disk of a Dataset and of a DatasetDict wrote
_NO_ROWS = {"dataset_info.json", "dataset_infos.json", _SAVED, _SAVED_SPLITS}  # what `datasets` writes about rows
_AT_ONCE = 1000  # Arrow rows that become Python objects together


@dataclass(frozen=True)
class Table:
    """Rows of one file, one after the other.

    Attributes:
        name: of the file, for messages. label: as short as tells it from the others at the path, for uids.
        rows: in Arrow, or one JSON object each.
        lines: of JSON, the line of each row; None: rows are counted, and `first` of the file come before these.
    """

    name: str
    label: str
    rows: pyarrow.Table | Sequence[bytes]
    lines: Sequence[int] | None = None
    first: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, index: int) -> int:
        """Of the row in its file as a person counts: its line, or 1 for the first row."""
        return self.first + index + 1 if self.lines is None else self.lines[index]

    def place(self, index: int) -> str:
        """Where the row stands, for messages: file, line or row."""
        return f"{self.name}, {'row' if self.lines is None else 'line'} {self.number(index)}"

    def part(self, start: int, count: int) -> Table:
        """At most `count` rows from number `start` on."""
        end = min(len(self), start + count)
        rows = self.rows.slice(start, end - start) if isinstance(self.rows, pyarrow.Table) else self.rows[start:end]
        return replace(self, rows=rows, lines=self.lines and self.lines[start:end], first=self.first + start)

    def row(self, index: int) -> dict[str, Any]:
        """
        Raises:
            ConfigError: a line that is no JSON object.
        """
        if isinstance(self.rows, pyarrow.Table):
            (row,) = self.rows.slice(index, 1).to_pylist()
            return dict(row)
        return parse_line(self.rows[index], self.place(index))

    def each(self) -> Iterator[dict[str, Any]]:
        """Every row; as `row`, and faster."""
        if isinstance(self.rows, pyarrow.Table):
            for batch in self.rows.to_batches(max_chunksize=_AT_ONCE):
                yield from batch.to_pylist()
        else:
            yield from (self.row(index) for index in range(len(self)))


class Rows:
    """The rows of all files at a path, in the order of their names."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self._ends = list(itertools.accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def problem(self, index: int, fields: FieldsConfig, field: str = "environment") -> Problem:
        """The problem in row number `index`, under a uid of its file and row.

        Raises:
            ConfigError: as `problems.problem`, or a line that is no JSON object.
        """
        number = bisect.bisect_right(self._ends, index)
        table, row = self.tables[number], index - (self._ends[number - 1] if number else 0)
        return problem(table.row(row), fields, uid=f"{table.label}:{table.number(row)}", place=table.place(row), field=field)

    @classmethod
    def read(cls, path: str, field: str) -> Rows:
        """
        Args:
            field: what the recipe calls the path, for messages.

        Raises:
            ConfigError: nothing there, a damaged file, or no rows.
        """
        with reading(path, field):
            tables = [read_table(name, label) for name, label in files(path, field)]
        rows = cls([table for table in tables if len(table)])
        if not len(rows):
            raise ConfigError(f"{field}: {path} is empty: no rows to read")
        return rows


@contextmanager
def reading(path: str, field: str) -> Iterator[None]:
    """
    Raises:
        ConfigError: what storage and file formats raise within; names the field and the path.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (every store and every file format has exceptions of its own)
        raise ConfigError(f"{field}: cannot read {path}: {reason(error)}") from harmless(error)


def files(path: str, field: str) -> list[tuple[str, str]]:
    """The files that a path means, and a short name of each: itself, those of a glob, or those below a folder; sorted. A folder that
    save_to_disk wrote counts as a file.

    Raises:
        ConfigError: there is none.
    """
    url = resolve(path, field)
    system, root = fsspec.core.url_to_fs(url)
    if any(mark in root for mark in "*?["):
        found = system.glob(root)
    elif system.exists(f"{root.rstrip('/')}/{_SAVED}"):
        return [(path, PurePosixPath(path).name)]
    elif system.exists(f"{root.rstrip('/')}/{_SAVED_SPLITS}"):
        raise ConfigError(f"{field}: {path} holds several splits: name the folder of one, for example {path.rstrip('/')}/train")
    elif system.isdir(root):
        found = [name for name in system.find(root) if not any(part.startswith((".", "_")) for part in name[len(root) :].split("/"))]
        found = [name for name in found if PurePosixPath(name).name not in _NO_ROWS]
    else:
        found = [root] if system.exists(root) else []
        if not found:
            raise ConfigError(f"{field}: cannot read {path}: there is no such file")
    wanted = sorted(name for name in found if PurePosixPath(name).suffix in _SUFFIXES)
    if not wanted:
        raise ConfigError(f"{field}: {path}: no file that ends in {', '.join(_SUFFIXES)}")
    protocol = url.partition("://")[0] + "://" if "://" in url else ""
    named = [hidden(f"{protocol}{name}" if protocol and "://" not in name else name) for name in wanted]
    folder = posixpath.commonpath([posixpath.dirname(name) for name in wanted])
    return [(name, posixpath.relpath(one, folder)) for name, one in zip(named, wanted, strict=True)]


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """
    Raises:
        ConfigError: not a JSON object; names the place.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{place}: not a JSON object: {error}: write one object per line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a JSON object is wanted, this is {type(row).__name__}")
    return row


def json_lines(lines: Iterable[bytes], before: int = 0) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of what is not blank; a byte-order mark is left out. Lines of bytes end at a line feed alone, and not at U+2028.

    Args:
        before: lines of the file that come before these.
    """
    for number, line in enumerate(lines, start=before + 1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, text


def read_table(name: str, label: str) -> Table:
    """All rows of a file, or of a folder that save_to_disk wrote; those stay on disk, mapped into memory."""
    if PurePosixPath(name).suffix not in _SUFFIXES:
        import datasets  # a second, for those who need it

        return Table(name, label, datasets.load_from_disk(resolve(name, label)).with_format("arrow")[:])
    with fsspec.open(resolve(name, label), "rb") as file:
        if PurePosixPath(name).suffix == ".parquet":
            return Table(name, label, parquet.read_table(file))
        if PurePosixPath(name).suffix == ".json":
            return _json_document(name, label, file.read())
        return of_lines(name, label, json_lines(file))


def of_lines(name: str, label: str, lines: Iterable[tuple[int, bytes]]) -> Table:
    """From (line number, line)."""
    found = list(lines)
    return Table(name, label, [line for _, line in found], [number for number, _ in found])


def _json_document(name: str, label: str, content: bytes) -> Table:
    try:
        rows = json.loads(content.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):  # lines after all, as many tools write them
        return of_lines(name, label, json_lines(io.BytesIO(content)))
    rows = rows if isinstance(rows, list) else [rows]
    return Table(name, label, [json.dumps(row).encode() for row in rows])
