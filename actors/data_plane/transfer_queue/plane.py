"""TransferQueuePlane: what a put, a get, a claim and a clear mean in terms of requests to TransferQueue.

put     resolve keys ► written already? space? ► column types ► store values, note columns, lengths, tags ► publish
claim   take (the controller picks and marks in one step) ► notes ► meta;     too few ready: sleep, ask again
get     resolve keys ► load values                            clear   resolve keys ► forget

Only `publish` makes a put visible, and it comes last. Whatever fails or is cancelled before it, the samples that the put
made are forgotten; only an overwrite that is cancelled goes on to its end. With a bounded partition a put makes its samples
first and counts then: whoever went over the capacity gives them back and waits.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from actors.data_plane import codec
from actors.data_plane.connect import DataPlaneAddress
from actors.data_plane.interface import (
    AlreadyWrittenError,
    CapacityError,
    ClaimTimeoutError,
    Column,
    DataPlane,
    DataPlaneGoneError,
    Done,
    PartitionConflictError,
    PartitionStatus,
    UnknownFieldError,
    UnknownKeyError,
    UnknownPartitionError,
)
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.schema import Schema
from actors.data_plane.transfer_queue.connection import Deadline, connection
from actors.data_plane.transfer_queue.records import SHADOW, Record, schema_key, type_key
from actors.data_plane.transfer_queue.requests import Samples

_POLL_S = (0.01, 0.05)  # between looks at a partition; random, so that two waiting clients do not move in step
_ANSWER_S = 5.0  # what a claim's deadline grants an answer that is under way


class TransferQueuePlane(DataPlane):
    """A client of one run's queue; see `DataPlane`. Clients of one process share a connection."""

    def __init__(self, address: DataPlaneAddress, timeout_s: float) -> None:
        """Raises: DataPlaneGoneError, DataPlaneError (no Ray cluster attached)."""
        self._link = connection(address, timeout_s)
        super().__init__(self._link.loop, timeout_s)

    async def _register(self, partition_id: str, fields: Sequence[str], capacity: int | None, consumers: Sequence[str]) -> Done[None]:
        schema = Schema.build(partition_id, fields, capacity, consumers)
        what, deadline = f"register partition {partition_id!r}", Deadline(self._timeout_s)
        key = schema_key(schema)
        made = await self._link.ask(self._link.requests.resolve(SHADOW + partition_id, [key], create=True), what, deadline)
        if (await self._read_record(partition_id, deadline)).schema != schema:
            await self._link.ask(self._link.requests.forget(made), what, deadline)
            raise PartitionConflictError(f"partition {partition_id!r} exists with another schema")
        return Done(None)

    async def _put(self, meta: KVBatchMeta, columns: Mapping[str, Column], overwrite: bool) -> Done[KVBatchMeta]:
        record = await self._record(meta.partition_id)
        record.schema.check_put(meta, columns)
        if not (columns and meta.keys):
            return Done(meta.with_fields(*columns))
        types = codec.column_types(meta.partition_id, columns)
        if not types.keys() <= record.types.keys():  # another process may have written them first
            record = await self._read_record(meta.partition_id, Deadline(self._timeout_s))
        codec.check_types(meta.partition_id, record.types, types)
        record.schema.check_room(meta.partition_id, record.types, columns)
        what = f"put {len(meta)} samples into partition {meta.partition_id!r}"
        # A put of the same keys may have been cancelled: let it end, and then its clean-up, which it begins at its end.
        await self._loop.settled(self._timeout_s)
        if self._link.undoing:
            await asyncio.wait(self._link.undoing, timeout=self._timeout_s)
        samples = await self._admit(meta, record, columns, overwrite, what)
        mask = record.mask(columns)
        replacing = any(note.get("columns", 0) & mask for note in samples.notes)
        writing = asyncio.ensure_future(self._write(meta, samples, columns, types, what))
        try:
            await asyncio.shield(writing)
        except BaseException as error:
            if replacing and not writing.done():  # cancelled when some old values may be gone: all new ones is the way left
                self._link.give_back(_finish(writing))
            else:
                await self._withdraw(samples, error, writing)
            raise
        return Done(meta.with_fields(*columns), len(meta), codec.payload(columns))

    async def _write(
        self, meta: KVBatchMeta, samples: Samples, columns: Mapping[str, Column], types: Mapping[str, codec.ColumnType], what: str
    ) -> None:
        """Store the columns of samples that were admitted, and make them visible."""
        deadline = Deadline(self._timeout_s)
        record = await self._settle_types(meta.partition_id, types, deadline)
        encoded = [codec.encode(name, rows, record.types[name]) for name, rows in columns.items()]
        stored = {field: values for part in encoded for field, values in part.items()}
        notes = _notes(meta, samples, record.mask(columns))
        await self._link.ask(self._link.requests.store(samples, stored, notes), what, deadline)
        await self._link.ask(self._link.requests.publish(samples, list(stored)), what, deadline)

    async def _get(self, meta: KVBatchMeta, fields: Sequence[str]) -> Done[dict[str, list[Any]]]:
        record = await self._record(meta.partition_id)
        record.schema.check_fields(meta.partition_id, fields)
        if not (meta.keys and fields):
            return Done({name: [] for name in fields})
        what = f"get {', '.join(fields)} of {len(meta)} samples from partition {meta.partition_id!r}"
        deadline = Deadline(self._timeout_s)
        if any(name not in record.types for name in fields):
            record = await self._read_record(meta.partition_id, deadline)
        stored = {part: to for name in fields if name in record.types for part, to in codec.stored_types(name, record.types[name]).items()}
        samples = await self._link.ask(self._link.requests.resolve(meta.partition_id, meta.keys, create=False), what, deadline)
        if len(samples.indexes) < len(meta) or not samples.written.issuperset(stored) or not record.types.keys() >= set(fields):
            await self._explain(meta, record, fields, deadline)
        values = await self._link.ask(self._link.requests.load(samples, stored), what, deadline)
        columns = {name: codec.decode(name, record.types[name], values) for name in fields}
        return Done(columns, len(meta), codec.payload(columns))

    async def _claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> Done[KVBatchMeta]:
        record = await self._record(partition_id)
        record.schema.check_claim(partition_id, consumer, fields, count)
        what = f"claim {count} samples of partition {partition_id!r} for {consumer!r}"
        deadline, looked = Deadline(timeout_s), time.monotonic()

        async def undo(notes: list[dict[str, Any]]) -> None:
            await self._give_back(partition_id, consumer, [note["key"] for note in notes])

        while True:
            request = self._link.requests.take(partition_id, consumer, fields, count)
            if notes := await self._link.ask(request, what, Deadline(deadline.left + _ANSWER_S), undo):
                return Done(_meta(partition_id, consumer, fields, notes), count)
            if not deadline.left:
                break
            looked = await self._link.pause(min(random.uniform(*_POLL_S), deadline.left), what, looked)
        backlog = self._link.requests.backlog(partition_id, consumer, fields)
        ready, missing = await self._link.ask(backlog, what, Deadline(self._timeout_s))
        raise ClaimTimeoutError.of(partition_id, consumer, timeout_s, ready, count, missing)

    async def _unclaim(self, claimed: KVBatchMeta) -> None:
        await self._link.give_back(self._give_back(claimed.partition_id, claimed.task_name, claimed.keys))

    async def _clear(self, meta: KVBatchMeta) -> Done[None]:
        await self._record(meta.partition_id)
        if meta.keys:
            what, deadline = f"clear {len(meta)} samples of partition {meta.partition_id!r}", Deadline(self._timeout_s)
            samples = await self._link.ask(self._link.requests.resolve(meta.partition_id, meta.keys, create=False), what, deadline)
            await self._link.ask(self._link.requests.forget(samples), what, deadline)
        return Done(None, len(meta))

    async def _status(self, partition_id: str) -> Done[PartitionStatus]:
        schema, what = (await self._record(partition_id)).schema, f"count the samples of partition {partition_id!r}"
        notes = await self._link.ask(self._link.requests.listing(partition_id), what, Deadline(self._timeout_s))
        held = sum("columns" in note for note in notes.values())
        return Done(PartitionStatus(partition_id, held, schema.fields, schema.capacity, schema.consumers))

    def _partitions_used(self) -> list[str]:
        return list(self._link.records)

    async def _record(self, partition_id: str) -> Record:
        return self._link.records.get(partition_id) or await self._read_record(partition_id, Deadline(self._timeout_s))

    async def _read_record(self, partition_id: str, deadline: Deadline) -> Record:
        what = f"read the schema of partition {partition_id!r}"
        record = Record.parse(await self._link.ask(self._link.requests.listing(SHADOW + partition_id), what, deadline))
        if record is None:
            raise UnknownPartitionError(f"no partition {partition_id!r}: register it first")
        self._link.records[partition_id] = record
        return record

    async def _settle_types(self, partition_id: str, types: Mapping[str, codec.ColumnType], deadline: Deadline) -> Record:
        """The record with a type for each of these columns. The first writer decides; TransferQueue itself checks no types."""
        record = self._link.records[partition_id]
        if new := [type_key(name, kind) for name, kind in types.items() if name not in record.types]:
            what = f"settle column types of partition {partition_id!r}"
            await self._link.ask(self._link.requests.resolve(SHADOW + partition_id, new, create=True), what, deadline)
            record = await self._read_record(partition_id, deadline)
            record.schema.check_room(partition_id, record.order, [name for name in types if name not in record.order])
            codec.check_types(partition_id, record.types, types)
        return record

    async def _admit(self, meta: KVBatchMeta, record: Record, columns: Mapping[str, Column], overwrite: bool, what: str) -> Samples:
        """Samples for the keys, once none has these columns (unless `overwrite`) and there is space for those that are new."""
        where, mask, capacity = f"partition {meta.partition_id!r}", record.mask(columns), record.schema.capacity
        space = Deadline(self._timeout_s)
        while True:
            request = self._link.requests.resolve(meta.partition_id, meta.keys, create=True)
            samples = await self._link.ask(request, what, Deadline(self._timeout_s), undo=self._undo_put)
            try:
                common = record.mask(samples.written)
                for key, note in zip(meta.keys, samples.notes, strict=True):
                    if not overwrite and (both := (note.get("columns", 0) | common) & mask):
                        name = min(name for name in columns if both & record.mask([name]))
                        raise AlreadyWrittenError(f"{where}: column {name!r} is already written for key {key!r}")
                fresh = sum("columns" not in note for note in samples.notes)
                if capacity is None or not fresh:
                    return samples
                held = await self._link.ask(self._link.requests.count(meta.partition_id), what, Deadline(self._timeout_s))
                if held <= capacity:
                    return samples
                message = f"{where}: no space for {fresh} more samples, it holds {held - fresh} of {capacity}"
                if fresh > capacity:
                    raise CapacityError(message)
            except BaseException as error:
                await self._withdraw(samples, error)
                raise
            await self._undo_put(samples)
            await self._wait_for_space(meta.partition_id, capacity - fresh, space, message)

    async def _wait_for_space(self, partition_id: str, most: int, deadline: Deadline, message: str) -> None:
        what, looked = f"wait for space in partition {partition_id!r}", time.monotonic()
        while deadline.left:
            looked = await self._link.pause(min(random.uniform(*_POLL_S), deadline.left), what, looked)
            if await self._link.ask(self._link.requests.count(partition_id), what, Deadline(self._timeout_s)) <= most:
                return
        raise CapacityError(f"{message} after waiting {deadline.seconds:g} s")

    async def _withdraw(self, samples: Samples, error: BaseException, writing: asyncio.Future[None] | None = None) -> None:
        """Undo a put that failed: at once, or in the background when nobody waits any more or nobody answers."""
        undoing = self._link.give_back(self._undo_put(samples, writing))
        if isinstance(error, Exception) and not isinstance(error, DataPlaneGoneError):
            await asyncio.wait({undoing})

    async def _undo_put(self, samples: Samples, writing: asyncio.Future[None] | None = None) -> None:
        """Forget the samples that a put made; take back what it noted of those that it found, if it came to writing."""
        what, deadline = f"take back a put into partition {samples.partition_id!r}", Deadline(self._timeout_s)
        if writing is not None:
            writing.cancel()
            await asyncio.wait({writing})
            old = samples.rows([row for row, note in enumerate(samples.notes) if "columns" in note])
            if old.indexes:
                await self._link.ask(self._link.requests.note(old, old.notes), what, deadline)
        new = samples.rows([row for row, note in enumerate(samples.notes) if "columns" not in note])
        if new.indexes:
            await self._link.ask(self._link.requests.forget(new), what, deadline)

    async def _give_back(self, partition_id: str, consumer: str, keys: Sequence[str]) -> None:
        what = f"give back a claim of partition {partition_id!r} for {consumer!r}"
        await self._link.ask(self._link.requests.give_back(partition_id, consumer, keys), what, Deadline(self._timeout_s))

    async def _explain(self, meta: KVBatchMeta, record: Record, fields: Sequence[str], deadline: Deadline) -> NoReturn:
        """Raise the error that names the key or column which is not there."""
        where, what = f"partition {meta.partition_id!r}", f"look up what partition {meta.partition_id!r} holds"
        notes = await self._link.ask(self._link.requests.listing(meta.partition_id), what, deadline)
        if gone := [key for key in meta.keys if "columns" not in notes.get(key, {})]:
            raise UnknownKeyError(f"{where}: no key {gone[0]!r}")
        for name in fields:
            if lacking := [key for key in meta.keys if not notes[key]["columns"] & record.mask([name])]:
                raise UnknownFieldError(f"{where}: column {name!r} is not written for key {lacking[0]!r}")
        raise UnknownFieldError(f"{where}: {', '.join(fields)} are being written or cleared right now")


async def _finish(writing: asyncio.Future[None]) -> None:
    await writing


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


def _meta(partition_id: str, consumer: str, fields: Sequence[str], notes: Sequence[Mapping[str, Any]]) -> KVBatchMeta:
    known, tagged = all("length" in note for note in notes), any("tags" in note for note in notes)
    return KVBatchMeta(
        partition_id=partition_id,
        task_name=consumer,
        keys=tuple(note["key"] for note in notes),
        fields=frozenset(fields),
        sequence_lengths=tuple(note["length"] for note in notes) if known else (),
        tags=tuple(pickle.loads(note["tags"]) if "tags" in note else {} for note in notes) if tagged else (),
    )
