"""How columns reach the workers of one replica: the ranks that share a data-parallel index, and so the rows.

    independent            leader_broadcast
    plane ──► rank 0       plane ──► rank 0, the leader ── one broadcast ──► ranks 1 .. n-1
          ──► rank 1                     └── failed: it broadcasts why, and every rank raises
          ──► ...

With a leader the data plane is read once per replica instead of once per rank; the broadcast takes the workers' own links.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from actors.data_plane.interface import DataPlane, DataPlaneError
from actors.data_plane.meta import KVBatchMeta
from configs.policy import PolicyConfig

Columns = dict[str, list[torch.Tensor]]


class MissingColumnsError(ValueError):
    """A batch lacks columns that the stage reads; the message names both."""


class LeaderFetchError(DataPlaneError):
    """The replica's leader could not read the columns; the message is the leader's, which raises its own error."""


class ColumnReader:
    """Reads columns for this rank. A collective of all ranks to build; with a leader each read is a collective of the replica.

    policy.fetch "auto" has a leader wherever a replica has more than one rank.

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
        box: list[Any] = [None]
        failure: Exception | None = None
        if self._rank == self._leader:
            try:
                box = [{name: _pack(rows) for name, rows in self._plane.get(meta, fields).items()}]
            except Exception as error:  # noqa: BLE001  (the others wait for a word)
                box, failure = [f"{type(error).__name__}: {error}"], error
        torch.distributed.broadcast_object_list(box, src=self._leader, group=self._group, device=self._device)
        if failure is not None:
            raise failure
        if isinstance(box[0], str):
            raise LeaderFetchError(f"policy worker {self._leader}, which reads for worker {self._rank}, failed: {box[0]}")
        return {name: _unpack(*packed) for name, packed in box[0].items()}


def _pack(rows: list[torch.Tensor]) -> tuple[bytearray, torch.dtype, list[torch.Size]]:
    """The bytes of all rows (tensors take longer to pickle), dtype and shapes."""
    joined = torch.cat([row.reshape(-1) for row in rows])
    return bytearray(joined.view(torch.uint8).numpy()), joined.dtype, [row.shape for row in rows]


def _unpack(values: bytearray, dtype: torch.dtype, shapes: list[torch.Size]) -> list[torch.Tensor]:
    joined = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
    return [row.reshape(shape) for row, shape in zip(joined.split([shape.numel() for shape in shapes]), shapes, strict=True)]
