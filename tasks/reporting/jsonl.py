"""JSON lines: appended and flushed one by one, so that a run that dies leaves every line that it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class LinesWriter:
    """A file of JSON lines, open while a run writes it. A context manager."""

    def __init__(self, path: Path) -> None:
        # backslashreplace: a lone surrogate (a broken byte from a tokenizer) is written as its JSON escape.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def append(self, row: dict[str, Any]) -> None:
        """One line, flushed.

        Raises:
            ValueError: NaN or infinity, which JSON does not have.
        """
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line. A last line without its end is left out: the process died while it wrote it.

    Raises:
        ValueError: a whole line that is not a JSON object; the message names file and line.
        FileNotFoundError: no such file.
    """
    rows = []
    with path.open("rb") as file:  # lines of bytes end at a line feed alone
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            rows.append(row)
    return rows
