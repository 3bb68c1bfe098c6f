"""MemoryPlane: the data plane of one process, for unit tests of everything that reads and writes columns.

threads ──► one condition ──► {partition: {key: columns, length, tags}}, {consumer: claimed keys}
            held while they are touched; puts and claims wait on it
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.data_plane import codec, interface
from actors.data_plane.interface import Column, DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.schema import Schema


@dataclass
class _Sample:
    columns: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    tags: dict[str, Any] | None = None


@dataclass
class _Partition:
    schema: Schema
    types: dict[str, codec.ColumnType] = field(default_factory=dict)
    samples: dict[str, _Sample] = field(default_factory=dict)  # in order of first write
    claimed: dict[str, set[str]] = field(default_factory=dict)

    def unclaimed(self, consumer: str) -> list[str]:
        return [key for key in self.samples if key not in self.claimed.setdefault(consumer, set())]


class MemoryPlane(DataPlane):
    """Passes the same contract suite as `TransferQueuePlane`."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        super().__init__(timeout_s)
        self._partitions: dict[str, _Partition] = {}
        self._changed = threading.Condition()

    def _measured[T](self, operation: str, call: Callable[[], T], moved: Callable[[T], tuple[int, int]] = lambda _: (0, 0)) -> T:
        with self._changed:
            return super()._measured(operation, call, moved)

    def _register(self, partition_id: str, fields: Sequence[str], capacity: int | None, consumers: Sequence[str]) -> None:
        schema = Schema.build(partition_id, fields, capacity, consumers)
        if self._partitions.setdefault(partition_id, _Partition(schema)).schema != schema:
            raise interface.PartitionConflictError(f"partition {partition_id!r} exists with another schema")

    def _put(self, meta: KVBatchMeta, columns: Mapping[str, Column], overwrite: bool) -> None:
        partition = self._partition(meta.partition_id)
        partition.schema.check_put(meta, columns)
        if not (columns and meta.keys):
            return
        types = codec.column_types(meta.partition_id, columns)
        codec.check_types(meta.partition_id, partition.types, types)
        copies = {name: [codec.copy_row(name, row) for row in rows] for name, rows in columns.items()}
        tags = [codec.copy_row("tags", tag) for tag in meta.tags]
        self._wait_for_space(meta, partition, copies, overwrite)
        codec.check_types(meta.partition_id, partition.types, types)  # another put may have been first meanwhile
        partition.types = types | partition.types
        for row, key in enumerate(meta.keys):
            sample = partition.samples.setdefault(key, _Sample())
            sample.columns.update({name: values[row] for name, values in copies.items()})
            if meta.sequence_lengths:
                sample.length = meta.sequence_lengths[row]
            if tags:
                sample.tags = (sample.tags or {}) | tags[row]
        self._changed.notify_all()

    def _get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        partition, where = self._partition(meta.partition_id), f"partition {meta.partition_id!r}"
        partition.schema.check_fields(meta.partition_id, fields)
        for key in meta.keys:
            if key not in partition.samples:
                raise interface.UnknownKeyError(f"{where}: no key {key!r}")
        for name in fields:
            for key in meta.keys:
                if name not in partition.samples[key].columns:
                    raise interface.UnknownFieldError(f"{where}: column {name!r} is not written for key {key!r}")
        return {name: [codec.copy_row(name, partition.samples[key].columns[name]) for key in meta.keys] for name in fields}

    def _claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta:
        partition = self._partition(partition_id)
        partition.schema.check_claim(partition_id, consumer, fields, count)

        def ready() -> list[str]:
            return [key for key in partition.unclaimed(consumer) if partition.samples[key].columns.keys() >= set(fields)]

        if not self._changed.wait_for(lambda: len(ready()) >= count, timeout_s):
            waiting = [partition.samples[key].columns for key in partition.unclaimed(consumer)]
            lacking = {name: sum(name not in columns for columns in waiting) for name in fields}
            missing = {name: number for name, number in lacking.items() if number}
            raise interface.ClaimTimeoutError(f"partition {partition_id!r}: consumer {consumer!r}", timeout_s, len(ready()), count, missing)
        keys = tuple(ready()[:count])
        partition.claimed[consumer].update(keys)
        samples = [(key, partition.samples[key].length, copy.deepcopy(partition.samples[key].tags)) for key in keys]
        return KVBatchMeta.claimed(partition_id, consumer, fields, samples)

    def _clear(self, meta: KVBatchMeta) -> None:
        partition = self._partition(meta.partition_id)
        for key in meta.keys:
            partition.samples.pop(key, None)
        for keys in partition.claimed.values():
            keys.difference_update(meta.keys)
        self._changed.notify_all()

    def _samples(self, partition_id: str) -> int:
        return len(self._partition(partition_id).samples)

    def _partitions_used(self) -> list[str]:
        return list(self._partitions)

    def _partition(self, partition_id: str) -> _Partition:
        if partition_id not in self._partitions:
            raise interface.UnknownPartitionError(f"no partition {partition_id!r}: register it first")
        return self._partitions[partition_id]

    def _wait_for_space(self, meta: KVBatchMeta, partition: _Partition, columns: Mapping[str, Any], overwrite: bool) -> None:
        where, capacity = f"partition {meta.partition_id!r}", partition.schema.capacity

        def fresh() -> int:
            return sum(key not in partition.samples for key in meta.keys)

        def fits() -> bool:
            for key in () if overwrite else meta.keys:
                if both := sorted(partition.samples.get(key, _Sample()).columns.keys() & columns.keys()):
                    raise interface.AlreadyWrittenError(f"{where}: column {both[0]!r} is already written for key {key!r}")
            return capacity is None or not fresh() or len(partition.samples) + fresh() <= capacity

        if fits():
            return
        message = f"{where}: no space for {fresh()} more samples, it holds {len(partition.samples)} of {capacity}"
        if capacity is not None and fresh() > capacity:
            raise interface.CapacityError(message)
        if not self._changed.wait_for(fits, self._timeout_s):
            raise interface.CapacityError(f"{message} after waiting {self._timeout_s:g} s")
