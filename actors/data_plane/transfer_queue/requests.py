"""What the plane asks of TransferQueue, one coroutine each. No deadlines here: `Connection.run` keeps them.

Values go to the storage units and come from them directly, as blocks (storage.py), without the library's detour over padded or
nested tensors and their schemas; the controller learns only which columns of which samples are there. So a put costs the
same four round trips as TransferQueue's own, a get the same two, and both less work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQRequestType

from actors.data_plane import codec
from actors.data_plane.interface import DataPlaneError
from actors.data_plane.transfer_queue.storage import numbers, parse

_NBYTES = attrgetter("nbytes")
_OCCUPANCY = "occupancy"  # the consumer under whose name samples are counted; it never takes any

_MOST_SCRATCH = 256 * 2**20  # bytes that a process keeps between puts
_ALIGNMENT = 64  # bytes, enough for any dtype


@dataclass(frozen=True)
class Samples:
    """Keys as TransferQueue knows them: an index, and what was noted, for each key that is there.

    Attributes:
        written: stored fields that every one of them has.
    """

    partition_id: str
    indexes: list[int]
    notes: list[dict[str, Any]]
    written: frozenset[str]

    def rows(self, rows: Sequence[int]) -> Samples:
        """Only these."""
        return Samples(self.partition_id, [self.indexes[row] for row in rows], [self.notes[row] for row in rows], self.written)


class Requests:
    """Requests to one run's controller and storage units, through the library's client."""

    def __init__(self, client: AsyncTransferQueueClient) -> None:
        self._client = client
        self._storage = client.storage_manager
        self._scratch: torch.Tensor | None = None  # for packing puts: fresh memory costs six times the copy, its pages are faulted in first

    async def resolve(self, partition_id: str, keys: Sequence[str], create: bool) -> Samples:
        """The samples of these keys, in order; with `create` those that are not there are made, without columns."""
        found = await self._client.async_kv_retrieve_meta(keys=list(keys), partition_id=partition_id, create=create)
        return Samples(partition_id, found.global_indexes, found.custom_meta, frozenset(found.field_names))

    async def listing(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """What was noted of every key of a partition, in order of creation."""
        listing: dict[str, dict[str, dict[str, Any]]] = await self._client.async_kv_list(partition_id)
        return listing.get(partition_id, {})

    async def count(self, partition_id: str) -> int:
        """Samples of a partition, those that are being put included."""
        indexes, _ = await self._client.async_get_consumption_status(_OCCUPANCY, partition_id)
        return 0 if indexes is None else len(indexes)

    async def store(self, samples: Samples, fields: Mapping[str, list[torch.Tensor]], notes: Sequence[dict[str, Any]]) -> None:
        """Send values to the storage units, and notes to the controller. Nobody can read the values before `publish`."""
        parts = self._by_unit(samples)
        size = sum(sum(map(_NBYTES, values)) for values in fields.values()) + _ALIGNMENT * len(parts) * len(fields)
        kept, self._scratch = self._scratch, None
        buffer = kept if kept is not None and len(kept) >= size else torch.empty(size, dtype=torch.uint8)
        start, requests = 0, []
        for unit, rows in parts.items():
            data = {}
            for name, values in fields.items():
                part = [values[row] for row in rows]
                lengths = list(map(_NBYTES, part))
                packed = buffer[start : start + sum(lengths)]
                codec.pack(part, packed)
                data[name] = [packed, numbers(lengths)]
                start += -(-len(packed) // _ALIGNMENT) * _ALIGNMENT
            indexes = [samples.indexes[row] for row in rows]
            requests.append(self._storage._put_to_single_storage_unit(indexes, data, target_storage_unit=unit))
        # All of them end before the first error is raised: what comes after it must not be overtaken by one of these.
        outcomes = await asyncio.gather(*requests, self.note(samples, notes), return_exceptions=True)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            raise errors[0]
        # Kept for the next put, but not after an error: ZMQ may still read it.
        if len(buffer) <= _MOST_SCRATCH and (self._scratch is None or len(self._scratch) < len(buffer)):
            self._scratch = buffer

    async def note(self, samples: Samples, notes: Sequence[dict[str, Any]]) -> None:
        """Keep a few plain values with each sample."""
        # What the client's async_set_custom_meta sends, without its copies of the batch: 1 ms instead of 11 for 512 samples.
        body = {"partition_custom_meta": {samples.partition_id: dict(zip(samples.indexes, notes, strict=True))}}
        await self._controller(ZMQRequestType.SET_CUSTOM_META, ZMQRequestType.SET_CUSTOM_META_RESPONSE, body)

    async def publish(self, samples: Samples, fields: Sequence[str]) -> None:
        """Make stored fields readable, and their samples claimable.

        Raises:
            DataPlaneError: the controller refused.
        """
        # "Non-tensor" keeps the controller from tracking a shape for every row, which it would send back with every answer.
        body = {
            "partition_id": samples.partition_id,
            "global_indexes": samples.indexes,
            "field_schema": {name: {"is_non_tensor": True} for name in fields},
            "custom_backend_meta": {},
        }
        answer = await self._controller(ZMQRequestType.NOTIFY_DATA_UPDATE, ZMQRequestType.NOTIFY_DATA_UPDATE_ACK, body)
        if not answer["success"]:
            raise DataPlaneError(f"partition {samples.partition_id!r}: the controller did not record {', '.join(fields)}")

    async def load(self, samples: Samples, fields: Mapping[str, tuple[torch.dtype, bool]]) -> dict[str, list[torch.Tensor]]:
        """Rows of stored fields, in order of the samples.

        Args:
            fields: for each the dtype of its rows, and whether they are scalars.

        Raises:
            StorageKeyNotFoundError: a sample was cleared meanwhile.
        """
        parts, names = self._by_unit(samples), list(fields)
        answers = await asyncio.gather(
            *(
                self._storage._get_from_single_storage_unit([samples.indexes[row] for row in rows], names, target_storage_unit=unit)
                for unit, rows in parts.items()
            )
        )
        loaded: dict[str, list[Any]] = {name: [None] * len(samples.indexes) for name in names}
        for rows, (_, columns) in zip(parts.values(), answers, strict=True):
            for name, (dtype, scalar) in fields.items():
                column, (packed, lengths) = loaded[name], columns[name]
                for row, value in zip(rows, codec.unpack(packed, parse(lengths), dtype, scalar), strict=True):
                    column[row] = value
        return loaded

    async def forget(self, samples: Samples) -> None:
        """Remove samples, their values and notes."""
        if samples.indexes:
            await self._client.async_clear_samples(BatchMeta(samples.indexes, [samples.partition_id] * len(samples.indexes)))

    async def withdraw(self, samples: Samples, noted: bool = False) -> None:
        """Undo a put: forget the samples that it made, and with `noted` restore the notes of those that it found."""
        old = samples.rows([row for row, note in enumerate(samples.notes) if "columns" in note])
        new = samples.rows([row for row, note in enumerate(samples.notes) if "columns" not in note])
        with contextlib.suppress(Exception):  # the queue has gone, and with it what was to be undone
            if noted and old.indexes:
                await self.note(old, old.notes)
            await self.forget(new)

    async def take(
        self, partition_id: str, consumer: str, fields: Sequence[str], count: int, give_back: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """The notes of the next `count` samples that have all these fields, taken for this consumer; or of none.

        Args:
            give_back: keys that it took before; they are ready again.
        """
        # For FirstWrittenSampler. The controller polls nothing by itself (polling_mode): it answers at once, maybe with nothing.
        config = {"consumer": consumer, "give_back": list(give_back)}
        found = await self._client.async_get_meta(
            list(fields), count, partition_id, mode="fetch", task_name=consumer, sampling_config=config
        )
        return list(found.custom_meta)

    async def give_back(self, partition_id: str, consumer: str, keys: Sequence[str]) -> None:
        """Make samples that were taken ready again."""
        await self.take(partition_id, consumer, [], 0, keys)

    async def backlog(self, partition_id: str, consumer: str, fields: Sequence[str]) -> tuple[int, dict[str, int]]:
        """How many samples this consumer could take, and for each field how many of the untaken ones lack it."""
        indexes, taken = await self._client.async_get_consumption_status(consumer, partition_id)
        if indexes is None:
            return 0, {}
        ready = untaken = {int(index) for index, done in zip(indexes, taken, strict=True) if not done}
        missing = {}
        for name in fields:
            indexes, there = await self._client.async_get_production_status([name], partition_id)
            have = set() if indexes is None else {int(index) for index, done in zip(indexes, there[:, 0], strict=True) if done}
            if lacking := untaken - have:
                missing[name] = len(lacking)
            ready = ready & have
        return len(ready), missing

    def _by_unit(self, samples: Samples) -> dict[str, list[int]]:
        """Row numbers by the storage unit that holds them: the library's rule, index modulo units."""
        units, rows = list(self._storage.storage_unit_infos), defaultdict[str, list[int]](list)
        for row, index in enumerate(samples.indexes):
            rows[units[index % len(units)]].append(row)
        return rows

    async def _controller(self, request: ZMQRequestType, response: ZMQRequestType, body: dict[str, Any]) -> dict[str, Any]:
        async with self._client.controller_rpc_pool.alease(self._client._controller) as socket:
            answer = await self._client._request_controller(socket=socket, request_type=request, response_type=response, body=body)
        return dict(answer.body)
