"""MemoryPlane: the data plane of one process, for unit tests of everything that reads and writes columns.

threads ── put ──► {partition: {key: {column: value}}} ── get ──► threads        one lock; a full partition's put waits on it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.data_plane import codec
from actors.data_plane.interface import (
    AlreadyWrittenError,
    CapacityError,
    Column,
    DataPlane,
    DataPlaneGoneError,
    PartitionConflictError,
    PartitionStatus,
    UnknownFieldError,
    UnknownKeyError,
    UnknownPartitionError,
    check_schema,
)
from actors.data_plane.meta import KVBatchMeta


@dataclass
class _Partition:
    fields: frozenset[str]
    capacity: int | None
    types: dict[str, codec.ColumnType] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)


class MemoryPlane(DataPlane):
    """Passes the same contract suite as `TransferQueuePlane`. Safe to share between threads."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._partitions: dict[str, _Partition] = {}
        self._changed = threading.Condition()
        self._closed = False

    def with_timeout(self, timeout_s: float) -> MemoryPlane:
        """Another client of the same partitions."""
        other = MemoryPlane(timeout_s)
        other._partitions, other._changed = self._partitions, self._changed
        return other

    def register_partition(self, partition_id: str, *, fields: Sequence[str], capacity: int | None = None) -> None:
        schema = check_schema(partition_id, fields, capacity)
        with self._changed:
            self._open()
            known = self._partitions.setdefault(partition_id, _Partition(schema, capacity))
        if (known.fields, known.capacity) != (schema, capacity):
            raise PartitionConflictError(f"partition {partition_id!r} exists with other columns or another capacity")

    def put(self, meta: KVBatchMeta, columns: Mapping[str, Column], *, overwrite: bool = False) -> KVBatchMeta:
        with self._changed:
            partition = self._partition(meta.partition_id)
            types = codec.check_columns(meta, columns, partition.fields)
            for name, kind in types.items():
                codec.check_type(partition.types.get(name, kind), kind, f"partition {meta.partition_id!r}: column {name!r}")
            copies = {name: [codec.copy_row(name, row) for row in rows] for name, rows in columns.items()}
            if not copies:
                return meta
            self._wait_for_space(meta, partition, copies, overwrite)
            partition.types = types | partition.types
            for row, key in enumerate(meta.keys):
                partition.rows.setdefault(key, {}).update({name: values[row] for name, values in copies.items()})
        return meta.with_fields(*columns)

    def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        with self._changed:
            partition = self._partition(meta.partition_id)
            codec.check_fields(meta.partition_id, fields, partition.fields)
            where = f"partition {meta.partition_id!r}"
            for key in meta.keys:
                if key not in partition.rows:
                    raise UnknownKeyError(f"{where}: no key {key!r}")
            for name in fields:
                for key in meta.keys:
                    if name not in partition.rows[key]:
                        raise UnknownFieldError(f"{where}: column {name!r} is not written for key {key!r}")
            return {name: [codec.copy_row(name, partition.rows[key][name]) for key in meta.keys] for name in fields}

    def clear(self, meta: KVBatchMeta) -> None:
        with self._changed:
            partition = self._partition(meta.partition_id)
            for key in meta.keys:
                partition.rows.pop(key, None)
            self._changed.notify_all()

    def status(self, partition_id: str) -> PartitionStatus:
        with self._changed:
            partition = self._partition(partition_id)
            return PartitionStatus(partition_id, len(partition.rows), partition.fields, partition.capacity)

    def close(self) -> None:
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise DataPlaneGoneError("this data-plane client is closed")

    def _partition(self, partition_id: str) -> _Partition:
        self._open()
        if partition_id not in self._partitions:
            raise UnknownPartitionError(f"no partition {partition_id!r}: register it first")
        return self._partitions[partition_id]

    def _wait_for_space(self, meta: KVBatchMeta, partition: _Partition, columns: Mapping[str, Any], overwrite: bool) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            for key in () if overwrite else meta.keys:
                if both := sorted(partition.rows.get(key, {}).keys() & columns.keys()):
                    raise AlreadyWrittenError(f"partition {meta.partition_id!r}: column {both[0]!r} is already written for key {key!r}")
            fresh = sum(key not in partition.rows for key in meta.keys)
            held, capacity = len(partition.rows), partition.capacity
            if capacity is None or not fresh or held + fresh <= capacity:
                return
            message = f"partition {meta.partition_id!r}: no space for {fresh} more samples, it holds {held} of {capacity}"
            if fresh > capacity:
                raise CapacityError(message)
            if not self._changed.wait(timeout=deadline - time.monotonic()):
                raise CapacityError(f"{message} after waiting {self._timeout_s:g} s")
