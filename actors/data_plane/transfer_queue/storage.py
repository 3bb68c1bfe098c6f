"""How a storage unit keeps values: the rows of a column that came together stay one block of bytes. Runs inside the unit.

put   block of rows 7, 8, 9  ──►  [ 7 | 8 | 9 ]        one frame in
get   rows 7, 8, 9           ◄──  [ 7 | 8 | 9 ]        one frame out: the block itself when its rows are asked for in order
clear rows 7, 9              ──►  [ 8 ]                a block less than half in use is written anew

TransferQueue's own container keeps a tensor per row and sends a frame per row: 50 us each, 1 s for a rollout of 4,096 samples
and 5 columns. Dtypes and shapes are the client's business (`codec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError, StorageUnitData


def keep_blocks(unit: Any) -> None:
    """Give a storage unit, before its first put, a container of blocks."""
    unit.storage_data = BlockData(unit.storage_data.storage_size)


class Block:
    """Rows of one column, one after another.

    Attributes:
        data: uint8 [bytes].
        rows: first byte and byte past the last, by sample index, of those that are still there.
        live: bytes of those.
    """

    def __init__(self, data: torch.Tensor, indexes: Sequence[int], lengths: Sequence[int]) -> None:
        self.data, self.rows, self.live = data, dict[int, tuple[int, int]](), 0
        for index, length in zip(indexes, lengths, strict=True):
            self.rows[index] = (self.live, self.live + length)
            self.live += length

    def drop(self, index: int) -> None:
        """Forget a row, and give its memory back once less than half of the block is in use."""
        start, stop = self.rows.pop(index)
        self.live -= stop - start
        if self.rows and 2 * self.live < len(self.data):
            spans = list(self.rows.values())
            self.__init__(torch.cat([self.data[a:b] for a, b in spans]), list(self.rows), [b - a for a, b in spans])  # type: ignore[misc]


class BlockData(StorageUnitData):  # type: ignore[misc]
    """Same interface as its base, but a column goes in and comes out as [bytes uint8 [total], row lengths in bytes int64 [n]]."""

    def put_data(self, field_data: dict[str, list[torch.Tensor]], global_indexes: list[int]) -> None:
        """Keep columns for these samples; rows that were there are replaced."""
        for name, (data, lengths) in field_data.items():
            column, block = self.field_data.setdefault(name, {}), Block(data, global_indexes, lengths.tolist())
            for index in global_indexes:
                if index in column:
                    column[index].drop(index)
                column[index] = block
        self._active_keys.update(global_indexes)

    def get_data(self, fields: list[str], global_indexes: list[int]) -> dict[str, list[torch.Tensor]]:
        """Columns of these samples, in this order.

        Raises:
            StorageKeyNotFoundError: a sample without such a row.
        """
        return {name: self._column(name, global_indexes) for name in fields}

    def clear(self, keys: list[int]) -> None:
        """Remove samples. Those that are not there are no error."""
        for column in self.field_data.values():
            for index in keys:
                if block := column.pop(index, None):
                    block.drop(index)
        self._active_keys -= set(keys)

    def _column(self, name: str, indexes: list[int]) -> list[torch.Tensor]:
        column = self.field_data.get(name, {})
        lengths, runs = [], list[tuple[Block, int, int]]()
        for index in indexes:
            if index not in column:
                raise StorageKeyNotFoundError(f"no row of {name!r} for index {index}")
            block = column[index]
            start, stop = block.rows[index]
            lengths.append(stop - start)
            if runs and runs[-1][0] is block and runs[-1][2] == start:
                runs[-1] = (block, runs[-1][1], stop)
            else:
                runs.append((block, start, stop))
        parts = [block.data[start:stop] for block, start, stop in runs]
        return [parts[0] if len(parts) == 1 else torch.cat(parts), torch.tensor(lengths)]
