"""The one road for tensors: columns under keys, in partitions.

    writer ── put(meta, columns) ──► partition ── claim(consumer, fields, count) ──► meta   each sample once to each consumer
                                        ├── get(meta, fields) ──► columns
                                        └── clear(meta)

Two implementations pass one contract suite (tests/actors/data_plane/): `transfer_queue.TransferQueuePlane` and
`memory.MemoryPlane`. Values come back with the bits, dtype and shape they had. put, get, claim and clear have an `async_` form
for use inside asyncio actors; both forms run the same coroutine on a thread of the data plane's own (`loop.LoopThread`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.data_plane.loop import LoopStoppedError, LoopStuckError, LoopThread, Request, Undo
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.usage import OperationUsage, flatten, merge
from configs.deadlines import DATA_PLANE_GRACE_S

# One value per row: tensors of one dtype (0-d ones are scalars; shapes may differ from row to row), or picklable values.
Column = Sequence[torch.Tensor] | Sequence[Any]


class DataPlaneError(RuntimeError):
    """Base of every error of the data plane."""


class UnknownPartitionError(DataPlaneError):
    """The partition was never registered, or its run has ended."""


class UnknownKeyError(DataPlaneError):
    """A key that was never put, or was cleared."""


class UnknownFieldError(DataPlaneError):
    """A column that the partition's schema does not name, or that was not written for a key."""


class UnknownConsumerError(DataPlaneError):
    """A claim by a task that the partition was not registered with."""


class RowCountError(DataPlaneError):
    """A column, lengths or tags whose number of rows differs from the number of keys."""


class ColumnTypeError(DataPlaneError):
    """A column whose rows differ in dtype, or whose type differs from the one it was first written with."""


class PartitionConflictError(DataPlaneError):
    """A partition registered again with another schema."""


class AlreadyWrittenError(DataPlaneError):
    """A (key, field) that exists, written again without `overwrite=True`."""


class CapacityError(DataPlaneError):
    """A put that waited for space until its deadline, or that could never fit."""


class UnsatisfiableClaimError(DataPlaneError):
    """A claim that no put could ever satisfy."""


class ClaimTimeoutError(DataPlaneError):
    """A claim that waited for samples until its deadline. It has taken none.

    Attributes:
        ready: samples that could have been claimed.
        wanted: samples asked for.
        missing: for each named column that unclaimed samples lack, how many lack it.
    """

    def __init__(self, message: str, ready: int = 0, wanted: int = 0, missing: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.ready, self.wanted, self.missing = ready, wanted, dict(missing or {})

    @staticmethod
    def of(partition_id: str, consumer: str, timeout_s: float, ready: int, wanted: int, missing: Mapping[str, int]) -> ClaimTimeoutError:
        """The error with its message."""
        lacking = ", ".join(f"{name!r} is not written for {count} samples" for name, count in missing.items())
        why = lacking or "every sample that is there has them: more must be put"
        message = f"partition {partition_id!r}: consumer {consumer!r} waited {timeout_s:g} s, {ready} of {wanted} samples are ready; {why}"
        return ClaimTimeoutError(message, ready, wanted, missing)


class DataPlaneGoneError(DataPlaneError):
    """An actor behind the data plane died or did not answer in time, or this client was closed."""


@dataclass(frozen=True)
class PartitionStatus:
    """What a partition holds now.

    Attributes:
        samples: keys with at least one column.
        fields: the columns it was registered with.
        capacity: most samples held at once, or None.
        consumers: tasks that may claim its samples.
    """

    partition_id: str
    samples: int
    fields: frozenset[str]
    capacity: int | None
    consumers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Done[T]:
    """What a request hands back: its value, and how much it moved (rows, and bytes of column payload)."""

    value: T
    rows: int = 0
    bytes: int = 0


class DataPlane(ABC):
    """A client. Each process has its own; all of a run see the same partitions. Safe to share between threads and loops.

    Every call has a deadline: answers are waited for `timeout_s` in all, and a put waits at most as long again for space.
    """

    def __init__(self, loop: LoopThread, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._closed = False
        self._usage: dict[str, OperationUsage] = {}
        self._counting = threading.Lock()

    def register_partition(
        self,
        partition_id: str,
        *,
        fields: Sequence[str],
        capacity: int | None = None,
        consumers: Sequence[str] = (),
    ) -> None:
        """Create a partition. Registering the same schema again is a no-op.

        Args:
            fields: the columns that may be written to it; any other is an `UnknownFieldError`.
            capacity: most samples held at once; a put beyond it waits, then raises `CapacityError`. None: no bound.
            consumers: tasks that may `claim` its samples.

        Raises:
            ValueError: no columns, a doubled or reserved name, or a capacity below 1.
            PartitionConflictError, DataPlaneGoneError.
        """
        self._wait("register", self._register(partition_id, fields, capacity, consumers))

    def put(self, meta: KVBatchMeta, columns: Mapping[str, Column], *, overwrite: bool = False) -> KVBatchMeta:
        """Write columns under the meta's keys (new or existing), all or nothing. Returns the meta with the columns in `fields`.

        Values are copied, and must not change before the call ends. A column's type (dtype, and scalars, vectors, arrays or
        plain values) is fixed by its first put. The meta's sequence lengths and tags are kept with the samples, for `claim`;
        those of a later put replace lengths and are merged into tags.
        Several processes may write at once, but not the same keys: the check for written columns is not a lock. An overwrite
        that ends in `DataPlaneGoneError` may have replaced the values that other storage actors hold.

        Raises:
            UnknownPartitionError, UnknownFieldError, RowCountError, ColumnTypeError, AlreadyWrittenError, CapacityError,
            DataPlaneGoneError.
        """
        return self._wait("put", self._put(meta, columns, overwrite))

    async def async_put(self, meta: KVBatchMeta, columns: Mapping[str, Column], *, overwrite: bool = False) -> KVBatchMeta:
        """`put`, without blocking the event loop."""
        return await self._wait_async("put", self._put(meta, columns, overwrite))

    def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        """Read the named columns in the order of the meta's keys: one CPU tensor (or plain value) per row, the caller's own.

        The tensors of a column may share one block of memory, without overlap: a row that is kept keeps the block.

        Raises:
            UnknownPartitionError, UnknownKeyError, UnknownFieldError, DataPlaneGoneError.
        """
        return self._wait("get", self._get(meta, fields))

    async def async_get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        """`get`, without blocking the event loop."""
        return await self._wait_async("get", self._get(meta, fields))

    def claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta:
        """Take the next `count` samples whose named columns are all written, in the order in which they were first written.

        Each consumer has a cursor of its own: a sample is handed to each consumer exactly once, whatever claims run at the
        same time. A sample that is cleared and put again is a new sample. The claim waits until all `count` are ready; it
        takes none when it fails or is cancelled, unless the caller's process dies.

        Returns:
            Keys, the named columns in `fields`, `task_name` = consumer, and the tags that the puts gave (a sample without
            tags has none); sequence lengths, if every sample has one.

        Raises:
            ClaimTimeoutError: not enough samples within `timeout_s` seconds.
            UnsatisfiableClaimError: a count below 1 or above the capacity, or no columns named.
            UnknownPartitionError, UnknownConsumerError, UnknownFieldError, DataPlaneGoneError.
        """
        request = self._claim(partition_id, consumer, fields, count, timeout_s)
        return self._wait("claim", request, timeout_s, undo=self._unclaim)

    async def async_claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta:
        """`claim`, without blocking the event loop. When it is cancelled, what it has taken goes back."""
        request = self._claim(partition_id, consumer, fields, count, timeout_s)
        return await self._wait_async("claim", request, timeout_s, undo=self._unclaim)

    def clear(self, meta: KVBatchMeta) -> None:
        """Forget exactly these keys. Keys that are already gone are no error.

        Raises:
            UnknownPartitionError, DataPlaneGoneError.
        """
        self._wait("clear", self._clear(meta))

    async def async_clear(self, meta: KVBatchMeta) -> None:
        """`clear`, without blocking the event loop."""
        await self._wait_async("clear", self._clear(meta))

    def status(self, partition_id: str) -> PartitionStatus:
        """Occupancy of one partition.

        Raises:
            UnknownPartitionError, DataPlaneGoneError.
        """
        return self._wait("status", self._status(partition_id))

    def usage(self) -> dict[str, OperationUsage]:
        """What this client did so far, by operation: a copy, picklable, for `metrics.merge`."""
        with self._counting:
            return merge([self._usage])

    def metrics(self, others: Iterable[Mapping[str, OperationUsage]] = ()) -> dict[str, float]:
        """`usage` as flat numbers, and "data_plane/occupancy/<partition>" in samples for each partition that this client used.

        Args:
            others: usage of other clients, to be counted in.

        Raises:
            DataPlaneGoneError.
        """
        occupancy = {f"data_plane/occupancy/{name}": float(self.status(name).samples) for name in self._partitions_used()}
        return flatten(merge([self.usage(), *others])) | occupancy

    def close(self) -> None:
        """Release this client. Idempotent. The partitions live on until their owner ends."""
        self._closed = True

    @abstractmethod
    async def _register(self, partition_id: str, fields: Sequence[str], capacity: int | None, consumers: Sequence[str]) -> Done[None]: ...

    @abstractmethod
    async def _put(self, meta: KVBatchMeta, columns: Mapping[str, Column], overwrite: bool) -> Done[KVBatchMeta]: ...

    @abstractmethod
    async def _get(self, meta: KVBatchMeta, fields: Sequence[str]) -> Done[dict[str, list[Any]]]: ...

    @abstractmethod
    async def _claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> Done[KVBatchMeta]: ...

    @abstractmethod
    async def _unclaim(self, claimed: KVBatchMeta) -> None:
        """Give samples back to the consumer (the meta's task name) that nobody received."""

    @abstractmethod
    async def _clear(self, meta: KVBatchMeta) -> Done[None]: ...

    @abstractmethod
    async def _status(self, partition_id: str) -> Done[PartitionStatus]: ...

    @abstractmethod
    def _partitions_used(self) -> list[str]: ...

    def _wait[T](self, operation: str, request: Request[Done[T]], extra_s: float = 0.0, undo: Undo[T] | None = None) -> T:
        self._check_open(operation, request)
        try:
            return self._loop.wait(self._measured(operation, request, time.perf_counter()), self._limit_s(extra_s), undo)
        except LoopStuckError as error:
            raise DataPlaneGoneError(f"{operation}: {error} in all") from error
        except LoopStoppedError as error:
            request.close()
            raise DataPlaneGoneError(f"{operation}: the run's data plane was stopped") from error

    async def _wait_async[T](self, operation: str, request: Request[Done[T]], extra_s: float = 0.0, undo: Undo[T] | None = None) -> T:
        self._check_open(operation, request)
        try:
            return await self._loop.wait_async(self._measured(operation, request, time.perf_counter()), self._limit_s(extra_s), undo)
        except LoopStuckError as error:
            raise DataPlaneGoneError(f"{operation}: {error} in all") from error
        except LoopStoppedError as error:
            request.close()
            raise DataPlaneGoneError(f"{operation}: the run's data plane was stopped") from error

    def _limit_s(self, extra_s: float) -> float:
        return 2 * self._timeout_s + extra_s + DATA_PLANE_GRACE_S

    def _check_open(self, operation: str, request: Request[Any]) -> None:
        if self._closed:
            request.close()
            raise DataPlaneGoneError(f"{operation}: this data-plane client is closed")

    async def _measured[T](self, operation: str, request: Request[Done[T]], started: float) -> T:
        try:
            done = await request
        except BaseException:
            with self._counting:
                self._usage.setdefault(operation, OperationUsage()).errors += 1
            raise
        with self._counting:
            self._usage.setdefault(operation, OperationUsage()).add(done.rows, done.bytes, time.perf_counter() - started)
        return done.value
