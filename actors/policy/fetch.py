"""How columns reach the workers of one replica: the ranks that share a data-parallel index, and so the rows.

    independent            leader_broadcast
    plane ──► rank 0       plane ──► rank 0, the leader ── descriptor, then one broadcast per column ──► ranks 1 .. n-1
          ──► rank 1                     └── failed: the descriptor says why, and every rank raises
          ──► ...

The data plane is read once per replica instead of once per rank; the broadcast takes the workers' own links.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.data_plane.interface import DataPlane, DataPlaneError
from actors.data_plane.meta import KVBatchMeta
from configs.policy import PolicyConfig

Columns = dict[str, list[torch.Tensor]]


class MissingColumnsError(ValueError):
    """A batch lacks columns that the stage reads; the message names both."""


class LeaderFetchError(DataPlaneError):
    """The replica's leader could not read the columns; the message is the leader's. (The leader raises its own error.)"""


@dataclass(frozen=True)
class _Column:
    """One column on its way: its bytes follow."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Failure:
    message: str


class ColumnReader:
    """Reads columns for this rank. Building one is a collective of all ranks, and so, with "leader_broadcast", is each read of
    the replica's ranks. "auto" broadcasts wherever a replica has more than one rank.

    Args:
        device: of the policy's tensors: broadcasts go through its memory, over the policy's own backend (NCCL, gloo).
    """

    def __init__(self, plane: DataPlane, config: PolicyConfig, rank: int, device: torch.device) -> None:
        self._plane, self._rank, self._device = plane, rank, device
        self._leader, self._group = rank, None
        parallel = config.parallel
        if config.fetch == "independent" or parallel.world_size == parallel.data:
            return
        for ranks in parallel.replicas:  # every rank takes part in making every group
            group = torch.distributed.new_group(list(ranks), timeout=datetime.timedelta(seconds=config.timeout_s))
            if rank in ranks:
                self._leader, self._group = ranks[0], group

    def read(self, meta: KVBatchMeta, fields: Sequence[str]) -> Columns:
        """The columns of the meta's rows, in order: one CPU tensor per row.

        Raises:
            MissingColumnsError: a column that no stage has written.
            LeaderFetchError: the leader could not read them. DataPlaneError: this rank could not.
        """
        missing = set(fields) - meta.fields
        if missing:
            raise MissingColumnsError(
                f"wanted columns {sorted(fields)}, the batch has {sorted(meta.fields)}: {', '.join(sorted(missing))} not written yet"
            )
        if self._group is None:
            return self._plane.get(meta, fields)
        return self._hand_out(meta, fields) if self._rank == self._leader else self._take()

    def _hand_out(self, meta: KVBatchMeta, fields: Sequence[str]) -> Columns:
        try:
            columns = self._plane.get(meta, fields)
            described = tuple(_Column(name, rows[0].dtype, tuple(tuple(row.shape) for row in rows)) for name, rows in columns.items())
            buffers = [torch.cat([row.reshape(-1) for row in columns[column.name]]).view(torch.uint8) for column in described]
        except Exception as error:
            self._announce(_Failure(f"{type(error).__name__}: {error}"))  # the others wait for a word
            raise
        self._announce(described)
        for buffer in buffers:
            if len(buffer):
                torch.distributed.broadcast(buffer.to(self._device), src=self._leader, group=self._group)
        return columns

    def _take(self) -> Columns:
        said = self._announce(None)
        if isinstance(said, _Failure):
            raise LeaderFetchError(f"policy worker {self._leader}, which reads for worker {self._rank}, failed: {said.message}")
        columns: Columns = {}
        for column in said or ():
            sizes = [torch.Size(shape).numel() for shape in column.shapes]
            buffer = torch.empty(sum(sizes) * column.dtype.itemsize, dtype=torch.uint8, device=self._device)
            if len(buffer):
                torch.distributed.broadcast(buffer, src=self._leader, group=self._group)
            rows = buffer.cpu().view(column.dtype).split(sizes)
            columns[column.name] = [row.reshape(shape) for row, shape in zip(rows, column.shapes, strict=True)]
        return columns

    def _announce(self, said: tuple[_Column, ...] | _Failure | None) -> tuple[_Column, ...] | _Failure | None:
        """The leader's descriptor, on every rank of the replica."""
        box = [said]
        torch.distributed.broadcast_object_list(box, src=self._leader, group=self._group, device=self._device)
        return box[0]
