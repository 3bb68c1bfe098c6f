"""TransferQueuePlane: what a put, a get, a claim and a clear mean in terms of requests to TransferQueue.

put     resolve keys ► written already? space? ► column types ► store values, note columns, lengths, tags ► publish
claim   take (the controller picks and marks in one step) ► notes ► meta;     too few ready: sleep, ask again
get     resolve keys ► load values                            clear   resolve keys ► forget

Only `publish` makes a put visible, and it comes last. When something before it fails or is interrupted, the samples that the
put made are forgotten; only an interrupted overwrite goes on to its end. In a bounded partition a put makes its samples first
and counts then: a put that went over the capacity gives them back and waits.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from actors.data_plane import codec, interface
from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.interface import Column, DataPlane
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.schema import Schema
from actors.data_plane.transfer_queue.connection import connection
from actors.data_plane.transfer_queue.loop import completed
from actors.data_plane.transfer_queue.records import SHADOW, Record, schema_key, type_key
from actors.data_plane.transfer_queue.requests import Samples

_POLL_S = (0.01, 0.05)  # between looks at a partition; random, so that two waiting clients do not move in step
ANSWER_S = 10.0  # what waiting claims and puts grant an answer that is under way at their deadline


class TransferQueuePlane(DataPlane):
    """A client of one run's queue; see `DataPlane`. Clients of one process share a connection."""

    def __init__(self, address: DataPlaneAddress, timeout_s: float) -> None:
        """Raises: DataPlaneGoneError, DataPlaneError (no Ray cluster attached)."""
        super().__init__(timeout_s)
        self._link = connection(address, timeout_s)
        self._requests = self._link.requests

    def _register(self, partition_id: str, fields: Sequence[str], capacity: int | None, consumers: Sequence[str]) -> None:
        schema = Schema.build(partition_id, fields, capacity, consumers)
        self._link.run(self._create(partition_id, schema), f"register partition {partition_id!r}", self._timeout_s)

    async def _create(self, partition_id: str, schema: Schema) -> None:
        made = await self._requests.resolve(SHADOW + partition_id, [schema_key(schema)], create=True)
        if (await self._read_record(partition_id)).schema != schema:
            await self._requests.forget(made)
            raise interface.PartitionConflictError(f"partition {partition_id!r} exists with another schema")

    def _put(self, meta: KVBatchMeta, columns: Mapping[str, Column], overwrite: bool) -> None:
        what = f"put {len(meta)} samples into partition {meta.partition_id!r}"
        self._link.run(self._store(meta, columns, overwrite), what, 2 * self._timeout_s + ANSWER_S)

    async def _store(self, meta: KVBatchMeta, columns: Mapping[str, Column], overwrite: bool) -> None:
        record = await self._record(meta.partition_id)
        record.schema.check_put(meta, columns)
        if not (columns and meta.keys):
            return
        types = codec.column_types(meta.partition_id, columns)
        if not types.keys() <= record.types.keys():  # another process may have written them first
            record = await self._read_record(meta.partition_id)
        codec.check_types(meta.partition_id, record.types, types)
        await self._link.loop.settled(self._timeout_s)  # a put of the same keys may have been interrupted
        samples = await self._admit(meta, record, columns, overwrite)
        mask = record.schema.mask(columns)
        writing = self._write(meta, samples, columns, types)
        if any(note.get("columns", 0) & mask for note in samples.notes):
            await completed(writing)  # some old values may be gone: all new ones is the way left
        else:
            await writing

    async def _write(
        self, meta: KVBatchMeta, samples: Samples, columns: Mapping[str, Column], types: Mapping[str, codec.ColumnType]
    ) -> None:
        """Store the columns of samples that were admitted, and make them visible."""
        try:
            record = await self._settle_types(meta.partition_id, types)
            encoded = [codec.encode(name, rows, record.types[name]) for name, rows in columns.items()]
            stored = {field: values for part in encoded for field, values in part.items()}
            await self._requests.store(samples, stored, _notes(meta, samples, record.schema.mask(columns)))
            await self._requests.publish(samples, list(stored))
        except BaseException:
            await self._requests.withdraw(samples, noted=True)
            raise

    def _get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        what = f"get {', '.join(fields)} of {len(meta)} samples from partition {meta.partition_id!r}"
        return self._link.run(self._load(meta, fields), what, self._timeout_s)

    async def _load(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        record = await self._record(meta.partition_id)
        record.schema.check_fields(meta.partition_id, fields)
        if not (meta.keys and fields):
            return {name: [] for name in fields}
        if any(name not in record.types for name in fields):
            record = await self._read_record(meta.partition_id)
        stored = {part: to for name in fields if name in record.types for part, to in codec.stored_types(name, record.types[name]).items()}
        samples = await self._requests.resolve(meta.partition_id, meta.keys, create=False)
        if len(samples.indexes) < len(meta) or not samples.written.issuperset(stored) or not record.types.keys() >= set(fields):
            await self._explain(meta, record, fields)
        values = await self._requests.load(samples, stored)
        return {name: codec.decode(name, record.types[name], values) for name in fields}

    def _claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta:
        async def undo(claimed: KVBatchMeta) -> None:
            await self._requests.give_back(partition_id, consumer, claimed.keys)

        what = f"claim {count} samples of partition {partition_id!r} for {consumer!r}"
        return self._link.run(self._take(partition_id, consumer, fields, count, timeout_s), what, timeout_s + ANSWER_S, undo)

    async def _take(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta:
        end = time.monotonic() + timeout_s
        (await self._record(partition_id)).schema.check_claim(partition_id, consumer, fields, count)

        async def undo(notes: list[dict[str, Any]]) -> None:
            await self._requests.give_back(partition_id, consumer, [note["key"] for note in notes])

        while True:
            if notes := await completed(self._requests.take(partition_id, consumer, fields, count), undo):
                samples = [(note["key"], note.get("length"), pickle.loads(note["tags"]) if "tags" in note else None) for note in notes]
                return KVBatchMeta.claimed(partition_id, consumer, fields, samples)
            left = end - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(random.uniform(*_POLL_S), left))
        ready, missing = await self._requests.backlog(partition_id, consumer, fields)
        raise interface.ClaimTimeoutError(f"partition {partition_id!r}: consumer {consumer!r}", timeout_s, ready, count, missing)

    def _clear(self, meta: KVBatchMeta) -> None:
        self._link.run(self._forget(meta), f"clear {len(meta)} samples of partition {meta.partition_id!r}", self._timeout_s)

    async def _forget(self, meta: KVBatchMeta) -> None:
        await self._record(meta.partition_id)
        if meta.keys:
            await self._requests.forget(await self._requests.resolve(meta.partition_id, meta.keys, create=False))

    def _samples(self, partition_id: str) -> int:
        return self._link.run(self._count(partition_id), f"count the samples of partition {partition_id!r}", self._timeout_s)

    async def _count(self, partition_id: str) -> int:
        await self._record(partition_id)
        return sum("columns" in note for note in (await self._requests.listing(partition_id)).values())

    def _partitions_used(self) -> list[str]:
        return list(self._link.records)

    async def _record(self, partition_id: str) -> Record:
        return self._link.records.get(partition_id) or await self._read_record(partition_id)

    async def _read_record(self, partition_id: str) -> Record:
        record = Record.parse(await self._requests.listing(SHADOW + partition_id))
        if record is None:
            raise interface.UnknownPartitionError(f"no partition {partition_id!r}: register it first")
        self._link.records[partition_id] = record
        return record

    async def _settle_types(self, partition_id: str, types: Mapping[str, codec.ColumnType]) -> Record:
        """The record with a type for each of these columns. The first writer decides; TransferQueue itself checks no types."""
        record = self._link.records[partition_id]
        if new := [type_key(name, kind) for name, kind in types.items() if name not in record.types]:
            await self._requests.resolve(SHADOW + partition_id, new, create=True)
            record = await self._read_record(partition_id)
            codec.check_types(partition_id, record.types, types)
        return record

    async def _admit(self, meta: KVBatchMeta, record: Record, columns: Mapping[str, Column], overwrite: bool) -> Samples:
        """Samples for the keys, once none has these columns (unless `overwrite`) and there is space for those that are new."""
        where, mask, capacity = f"partition {meta.partition_id!r}", record.schema.mask(columns), record.schema.capacity
        end = time.monotonic() + self._timeout_s
        while True:
            creating = self._requests.resolve(meta.partition_id, meta.keys, create=True)
            samples = await completed(creating, undo=self._requests.withdraw)
            try:
                common = record.schema.mask(samples.written)
                for key, note in zip(meta.keys, samples.notes, strict=True):
                    if not overwrite and (both := (note.get("columns", 0) | common) & mask):
                        name = min(name for name in columns if both & record.schema.mask([name]))
                        raise interface.AlreadyWrittenError(f"{where}: column {name!r} is already written for key {key!r}")
                fresh = sum("columns" not in note for note in samples.notes)
                if capacity is None or not fresh:
                    return samples
                held = await self._requests.count(meta.partition_id)
                if held <= capacity:
                    return samples
                message = f"{where}: no space for {fresh} more samples, it holds {held - fresh} of {capacity}"
                if fresh > capacity:
                    raise interface.CapacityError(message)
            except BaseException:
                await self._requests.withdraw(samples)
                raise
            await completed(self._requests.withdraw(samples))
            await self._wait_for_space(meta.partition_id, capacity - fresh, end, message)

    async def _wait_for_space(self, partition_id: str, most: int, end: float, message: str) -> None:
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(random.uniform(*_POLL_S), left))
            if await self._requests.count(partition_id) <= most:
                return
        raise interface.CapacityError(f"{message} after waiting {self._timeout_s:g} s")

    async def _explain(self, meta: KVBatchMeta, record: Record, fields: Sequence[str]) -> NoReturn:
        """Raise the error that names the key or column which is not there."""
        where, notes = f"partition {meta.partition_id!r}", await self._requests.listing(meta.partition_id)
        if gone := [key for key in meta.keys if "columns" not in notes.get(key, {})]:
            raise interface.UnknownKeyError(f"{where}: no key {gone[0]!r}")
        for name in fields:
            if lacking := [key for key in meta.keys if not notes[key]["columns"] & record.schema.mask([name])]:
                raise interface.UnknownFieldError(f"{where}: column {name!r} is not written for key {lacking[0]!r}")
        raise interface.UnknownFieldError(f"{where}: {', '.join(fields)} are being written or cleared right now")


def _notes(meta: KVBatchMeta, samples: Samples, mask: int) -> list[dict[str, Any]]:
    """What is kept with each sample: its key, the bits of its columns, and its length and tags when they are known.

    Raises:
        ColumnTypeError: a tag that cannot be pickled.
    """
    notes = []
    for row, (key, old) in enumerate(zip(meta.keys, samples.notes, strict=True)):
        note = {**old, "key": key, "columns": old.get("columns", 0) | mask}
        if meta.sequence_lengths:
            note["length"] = meta.sequence_lengths[row]
        if meta.tags:
            tags = {**pickle.loads(old["tags"]), **meta.tags[row]} if "tags" in old else meta.tags[row]
            note["tags"] = codec.pickled(f"tags of key {key!r}", tags)  # bytes: MessagePack would turn tuples into lists
        notes.append(note)
    return notes
