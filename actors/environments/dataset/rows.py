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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet as parquet

from configs.base import ConfigError

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SAVED = "dataset_info.json"  # of a folder written by save_to_disk


@dataclass(frozen=True)
class Table:
    """One file. `lines`: of JSON, the line of each row; None: rows are counted from 1."""

    name: str
    rows: pyarrow.Table | Sequence[bytes]
    lines: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """Where the row stands, for messages: file, line or row."""
        return f"{self.name}, row {index + 1}" if self.lines is None else f"{self.name}, line {self.lines[index]}"

    def uid(self, index: int) -> str:
        """File and row, short."""
        return f"{PurePosixPath(self.name).name}:{index + 1 if self.lines is None else self.lines[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """
        Raises:
            ConfigError: a line that is no JSON object.
        """
        if isinstance(self.rows, pyarrow.Table):
            (row,) = self.rows.slice(index, 1).to_pylist()
            return dict(row)
        return parse_line(self.rows[index], self.place(index))


class Rows:
    """The rows of all files at a path, in the order of their names."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(itertools.accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def find(self, index: int) -> tuple[Table, int]:
        """The table of a row, and its number there."""
        number = bisect.bisect_right(self._ends, index)
        return self._tables[number], index - (self._ends[number - 1] if number else 0)

    @classmethod
    def read(cls, path: str, field: str) -> Rows:
        """
        Args:
            field: what the recipe calls the path, for messages.

        Raises:
            ConfigError: nothing there, a damaged file, or no rows.
        """
        try:
            tables = [_saved(path)] if _is_saved(path) else [_table(name) for name in files(path, field)]
        except ConfigError:
            raise
        except (OSError, ValueError, ImportError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{field}: cannot read {path}: {str(error) or type(error).__name__}") from None
        rows = cls([table for table in tables if len(table)])
        if not len(rows):
            raise ConfigError(f"{field}: {path} is empty: no rows to read")
        return rows


def files(path: str, field: str) -> list[str]:
    """The files that a path means: itself, those of a glob, or those below a folder; sorted.

    Raises:
        ConfigError: there is none.
    """
    system, root = fsspec.core.url_to_fs(path)
    if any(mark in root for mark in "*?["):
        found = system.glob(root)
    elif system.isdir(root):
        found = [name for name in system.find(root) if not any(part.startswith((".", "_")) for part in name[len(root) :].split("/"))]
    else:
        found = [root] if system.exists(root) else []
        if not found:
            raise ConfigError(f"{field}: cannot read {path}: there is no such file")
    wanted = sorted(name for name in found if PurePosixPath(name).suffix in _SUFFIXES)
    if not wanted:
        raise ConfigError(f"{field}: {path}: no file that ends in {', '.join(_SUFFIXES)}")
    protocol = path.partition("://")[0] + "://" if "://" in path else ""
    return [f"{protocol}{name}" if protocol and "://" not in name else name for name in wanted]


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


def _table(name: str) -> Table:
    with fsspec.open(name, "rb") as file:
        if PurePosixPath(name).suffix == ".parquet":
            return Table(name, parquet.read_table(file))
        if PurePosixPath(name).suffix == ".json":
            return _json_document(name, file.read())
        found = list(json_lines(file))
    return Table(name, [line for _, line in found], [number for number, _ in found])


def _json_document(name: str, content: bytes) -> Table:
    try:
        rows = json.loads(content.removeprefix(codecs.BOM_UTF8))
    except ValueError:  # lines after all, as many tools write them
        found = list(json_lines(io.BytesIO(content)))
        return Table(name, [line for _, line in found], [number for number, _ in found])
    rows = rows if isinstance(rows, list) else [rows]
    return Table(name, [json.dumps(row).encode() for row in rows])


def _is_saved(path: str) -> bool:
    system, root = fsspec.core.url_to_fs(path)
    return bool(system.exists(f"{root.rstrip('/')}/{_SAVED}"))


def _saved(path: str) -> Table:
    import datasets  # a second, for those who need it

    found = datasets.load_from_disk(path)
    return Table(path, found.with_format("arrow")[:])
