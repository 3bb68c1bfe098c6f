"""The one road for tensors: columns under keys, in partitions.

    writer ── put(meta, columns) ──► partition ── get(meta, fields) ──► reader
                                        └── clear(meta)

Two implementations pass one contract suite (tests/actors/data_plane/test_contract.py): `transfer_queue.TransferQueuePlane`
and `memory.MemoryPlane`. Values come back with the bits, dtype and shape they had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.data_plane.meta import KVBatchMeta

# One value per row. Tensors may differ in length from row to row (dimension 0) but not in dtype; 0-d tensors are scalars.
Column = Sequence[torch.Tensor] | Sequence[Any]


class DataPlaneError(RuntimeError):
    """Base of every error of the data plane; the message names partition, key or field."""


class UnknownPartitionError(DataPlaneError):
    """The partition was never registered, or its run has ended."""


class UnknownKeyError(DataPlaneError):
    """A key that was never put, or was cleared."""


class UnknownFieldError(DataPlaneError):
    """A column that the partition's schema does not name, or that was not written for a key."""


class RowCountError(DataPlaneError):
    """A column whose number of rows differs from the number of keys."""


class AlreadyWrittenError(DataPlaneError):
    """A (key, field) that exists, written again without `overwrite=True`."""


class CapacityError(DataPlaneError):
    """A put that waited for space until its deadline."""


class DataPlaneGoneError(DataPlaneError):
    """An actor behind the data plane died or did not answer in time."""


@dataclass(frozen=True)
class PartitionStatus:
    """What a partition holds now."""

    partition_id: str
    samples: int
    fields: frozenset[str]
    capacity: int | None


class DataPlane(ABC):
    """A client. Each process has its own; all of a run see the same partitions. Every call has a deadline."""

    @abstractmethod
    def register_partition(self, partition_id: str, *, fields: Sequence[str], capacity: int | None = None) -> None:
        """Create a partition with the columns that may be written to it. Registering the same schema again is a no-op.

        Args:
            capacity: most samples held at once; a put beyond it waits, then raises `CapacityError`. None: no bound.
        """

    @abstractmethod
    def put(self, meta: KVBatchMeta, columns: Mapping[str, Column], *, overwrite: bool = False) -> KVBatchMeta:
        """Write columns under the meta's keys (new or existing), all or nothing. Returns the meta with the columns in `fields`.

        Raises:
            UnknownPartitionError, UnknownFieldError, RowCountError, AlreadyWrittenError, CapacityError, DataPlaneGoneError.
        """

    @abstractmethod
    def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        """Read the named columns in the order of the meta's keys: one tensor (or plain value) per row.

        Raises:
            UnknownPartitionError, UnknownKeyError, UnknownFieldError, DataPlaneGoneError.
        """

    @abstractmethod
    def clear(self, meta: KVBatchMeta) -> None:
        """Forget exactly these keys. Keys that are already gone are no error."""

    @abstractmethod
    def status(self, partition_id: str) -> PartitionStatus:
        """Occupancy of one partition.

        Raises:
            UnknownPartitionError.
        """

    @abstractmethod
    def close(self) -> None:
        """Release this client. Idempotent. The partitions live on until their owner ends."""
