"""How a storage unit keeps values: the rows of a column that came together stay one block of bytes. Runs inside the unit.

put   block of rows 7, 8, 9  ──►  [ 7 | 8 | 9 ]        one frame in
get   rows 7, 8, 9           ◄──  [ 7 | 8 | 9 ]        one frame out: the block itself when its rows are asked for in order
clear rows 7, 9              ──►  [ 8 ]                a block less than half in use is written anew

TransferQueue's own container keeps a tensor per row and sends a frame per row: 50 us each, 1 s for a rollout of 4,096 samples
and 5 columns. Dtypes and shapes are the client's business (`codec`).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError, StorageUnitData


def numbers(values: Sequence[int]) -> bytes:
    """Whole numbers as int64 bytes: they travel inside the message, not as a frame of their own."""
    return array("q", values).tobytes()


def parse(text: bytes) -> Sequence[int]:
    """The inverse of `numbers`."""
    return array("q", text)


class Block:
    """Rows of one column, one after another.

    Attributes:
        data: uint8 [bytes].
        rows: position of each row, by sample index. Blocks that came together share this; it includes rows that are gone.
        edges: first byte of each row by position, and the end.
    """

    def __init__(self, data: torch.Tensor, rows: dict[int, int], lengths: Sequence[int]) -> None:
        self.data, self.rows = data, rows
        self.edges = [0, *accumulate(lengths)]
        self._gone = set[int]()
        self._wasted = 0

    def span(self, index: int) -> tuple[int, int]:
        """First byte of a row, and the byte past its last."""
        row = self.rows[index]
        return self.edges[row], self.edges[row + 1]

    def drop(self, indexes: Collection[int]) -> None:
        """Forget rows, and give their memory back once less than half of the block is in use."""
        self._gone.update(indexes)
        if len(self._gone) == len(self.rows):
            return  # its last reference is about to go
        self._wasted += sum(stop - start for start, stop in map(self.span, indexes))
        if 2 * self._wasted > len(self.data):
            left = [index for index in self.rows if index not in self._gone]
            spans = [self.span(index) for index in left]
            data = torch.cat([self.data[:0], *(self.data[start:stop] for start, stop in spans)])
            self.__init__(data, {index: row for row, index in enumerate(left)}, [b - a for a, b in spans])  # type: ignore[misc]


class BlockData(StorageUnitData):  # type: ignore[misc]
    """Same interface as its base, but a column goes in and comes out as [its bytes uint8 [total], `numbers` of bytes per row]."""

    def put_data(self, field_data: dict[str, list[Any]], global_indexes: list[int]) -> None:
        """Keep columns for these samples; rows that were there are replaced."""
        rows = {index: row for row, index in enumerate(global_indexes)}
        for name, (data, lengths) in field_data.items():
            column, block = self.field_data.setdefault(name, {}), Block(data, rows, parse(lengths))
            _remove(column, column.keys() & rows.keys())
            column.update(dict.fromkeys(global_indexes, block))
        self._active_keys.update(global_indexes)

    def get_data(self, fields: list[str], global_indexes: list[int]) -> dict[str, list[Any]]:
        """Columns of these samples, in this order.

        Raises:
            StorageKeyNotFoundError: a sample without such a row.
        """
        return {name: self._column(name, global_indexes) for name in fields}

    def clear(self, keys: list[int]) -> None:
        """Remove samples. Those that are not there are no error."""
        for column in self.field_data.values():
            _remove(column, column.keys() & set(keys))
        self._active_keys -= set(keys)

    def _column(self, name: str, indexes: list[int]) -> list[Any]:
        column = self.field_data.get(name, {})
        lengths, runs = [], list[tuple[Block, int, int]]()
        for index in indexes:
            if index not in column:
                raise StorageKeyNotFoundError(f"no row of {name!r} for index {index}")
            block = column[index]
            start, stop = block.span(index)
            lengths.append(stop - start)
            if runs and runs[-1][0] is block and runs[-1][2] == start:
                runs[-1] = (block, runs[-1][1], stop)
            else:
                runs.append((block, start, stop))
        parts = [block.data[start:stop] for block, start, stop in runs]
        return [parts[0] if len(parts) == 1 else torch.cat(parts), numbers(lengths)]


def _remove(column: dict[int, Block], indexes: Collection[int]) -> None:
    dropped = defaultdict[Block, list[int]](list)
    for index in indexes:
        dropped[column.pop(index)].append(index)
    for block, rows in dropped.items():
        block.drop(rows)
