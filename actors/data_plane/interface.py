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

# One value per row: tensors of one dtype (0-d ones are scalars; shapes may differ from row to row), or picklable values.
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


class ColumnTypeError(DataPlaneError):
    """A column whose rows differ in dtype, or whose type differs from the one it was first written with."""


class PartitionConflictError(DataPlaneError):
    """A partition registered again with other columns or another capacity."""


class AlreadyWrittenError(DataPlaneError):
    """A (key, field) that exists, written again without `overwrite=True`."""


class CapacityError(DataPlaneError):
    """A put that waited for space until its deadline."""


class DataPlaneGoneError(DataPlaneError):
    """An actor behind the data plane died or did not answer in time."""


@dataclass(frozen=True)
class PartitionStatus:
    """What a partition holds now.

    Attributes:
        samples: keys with at least one column.
        fields: the columns of its schema.
        capacity: most samples held at once, or None.
    """

    partition_id: str
    samples: int
    fields: frozenset[str]
    capacity: int | None


def check_schema(partition_id: str, fields: Sequence[str], capacity: int | None) -> frozenset[str]:
    """The columns of a partition as a set.

    Raises:
        ValueError: no columns, more than 63, a doubled or reserved name ("::" inside), or a capacity below 1.
    """
    schema = frozenset(fields)
    if not 1 <= len(schema) <= 63 or len(schema) != len(fields):
        raise ValueError(f"partition {partition_id!r}: needs 1 to 63 columns, each named once; got {list(fields)}")
    if reserved := [name for name in (partition_id, *sorted(schema)) if "::" in name]:
        raise ValueError(f"partition {partition_id!r}: '::' in {reserved[0]!r} is reserved")
    if capacity is not None and capacity < 1:
        raise ValueError(f"partition {partition_id!r}: a capacity of {capacity} holds nothing")
    return schema


class DataPlane(ABC):
    """A client. Each process has its own; all of a run see the same partitions. Every call has a deadline."""

    @abstractmethod
    def register_partition(self, partition_id: str, *, fields: Sequence[str], capacity: int | None = None) -> None:
        """Create a partition with the columns that may be written to it. Registering the same schema again is a no-op.

        Args:
            capacity: most samples held at once; a put beyond it waits, then raises `CapacityError`. None: no bound.

        Raises:
            ValueError: no columns, a doubled or reserved name, or a capacity below 1.
            PartitionConflictError, DataPlaneGoneError.
        """

    @abstractmethod
    def put(self, meta: KVBatchMeta, columns: Mapping[str, Column], *, overwrite: bool = False) -> KVBatchMeta:
        """Write columns under the meta's keys (new or existing), all or nothing. Returns the meta with the columns in `fields`.

        Values are copied. A column's type (dtype, and scalars, vectors, arrays or plain values) is fixed by its first put.
        Several processes may write at once, but not the same keys: the check for written columns is not a lock.

        Raises:
            UnknownPartitionError, UnknownFieldError, RowCountError, ColumnTypeError, AlreadyWrittenError, CapacityError,
            DataPlaneGoneError.
        """

    @abstractmethod
    def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        """Read the named columns in the order of the meta's keys: one CPU tensor (or plain value) per row, the caller's own.

        Raises:
            UnknownPartitionError, UnknownKeyError, UnknownFieldError, DataPlaneGoneError.
        """

    @abstractmethod
    def clear(self, meta: KVBatchMeta) -> None:
        """Forget exactly these keys. Keys that are already gone are no error.

        Raises:
            UnknownPartitionError, DataPlaneGoneError.
        """

    @abstractmethod
    def status(self, partition_id: str) -> PartitionStatus:
        """Occupancy of one partition.

        Raises:
            UnknownPartitionError, DataPlaneGoneError.
        """

    @abstractmethod
    def close(self) -> None:
        """Release this client. Idempotent. The partitions live on until their owner ends."""
