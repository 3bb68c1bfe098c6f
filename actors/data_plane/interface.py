"""The data plane, through which all tensors travel: columns under keys, in partitions.

    writer ── put(meta, columns) ──► partition ── claim(consumer, fields, count) ──► meta   each sample once to each consumer
                                        ├── get(meta, fields) ──► columns
                                        └── clear(meta)

Two implementations pass one contract suite (tests/actors/data_plane/): `transfer_queue.TransferQueuePlane` and
`in_memory.MemoryPlane`. Values come back with the bits, dtype and shape they had. Calls block the calling thread only.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.usage import OperationUsage, flatten, merge

# One value per row: tensors of one dtype (0-d ones are scalars; shapes may differ from row to row), or picklable values.
Column = Sequence[torch.Tensor] | Sequence[Any]
_NBYTES = attrgetter("nbytes")


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

    def __init__(self, where: str, timeout_s: float, ready: int, wanted: int, missing: Mapping[str, int]) -> None:
        super().__init__(where, timeout_s, ready, wanted, missing)  # all of them: it is pickled by its arguments
        lacking = ", ".join(f"{name!r} is not written for {count} samples" for name, count in missing.items())
        why = lacking or "every sample that is there has them: more must be put"
        self._message = f"{where} waited {timeout_s:g} s, {ready} of {wanted} samples are ready; {why}"
        self.ready, self.wanted, self.missing = ready, wanted, missing

    def __str__(self) -> str:
        return self._message


class DataPlaneGoneError(DataPlaneError):
    """An actor behind the data plane died or did not answer in time, or this client was closed."""


class DataPlane(ABC):
    """A client. Each process has its own; all of a run see the same partitions. Safe to share between threads.

    Every call has a deadline: `timeout_s` seconds, to which a put adds as long again for space, and a claim its own wait.
    """

    def __init__(self, timeout_s: float) -> None:
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
        self._measured("register", lambda: self._register(partition_id, fields, capacity, consumers))

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
        self._measured("put", lambda: self._put(meta, columns, overwrite), lambda _: (len(meta) if columns else 0, _payload(columns)))
        return meta.with_fields(*columns)

    def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        """Read the named columns in the order of the meta's keys: one CPU tensor (or plain value) per row, the caller's own.

        The tensors of a column may share one block of memory, without overlap: a row that is kept keeps the block.

        Raises:
            UnknownPartitionError, UnknownKeyError, UnknownFieldError, DataPlaneGoneError.
        """
        return self._measured("get", lambda: self._get(meta, fields), lambda columns: (len(meta) if fields else 0, _payload(columns)))

    def claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta:
        """Take the next `count` samples whose named columns are all written, in the order in which they were first written.

        Each consumer has a cursor of its own: a sample is handed to each consumer exactly once, whatever claims run at the
        same time. A sample that is cleared and put again is a new sample. The claim waits until all `count` are ready; it
        takes none when it fails or is interrupted, unless the caller's process dies.

        Returns:
            Keys, the named columns in `fields`, `task_name` = consumer, and the tags that the puts gave (a sample without
            tags has none); sequence lengths, if every sample has one.

        Raises:
            ClaimTimeoutError: not enough samples within `timeout_s` seconds.
            UnsatisfiableClaimError: a count below 1 or above the capacity, or no columns named.
            UnknownPartitionError, UnknownConsumerError, UnknownFieldError, DataPlaneGoneError.
        """
        return self._measured("claim", lambda: self._claim(partition_id, consumer, fields, count, timeout_s), lambda _: (count, 0))

    def clear(self, meta: KVBatchMeta) -> None:
        """Forget exactly these keys. Keys that are already gone are no error.

        Raises:
            UnknownPartitionError, DataPlaneGoneError.
        """
        self._measured("clear", lambda: self._clear(meta), lambda _: (len(meta), 0))

    def samples(self, partition_id: str) -> int:
        """How many keys of the partition have at least one column.

        Raises:
            UnknownPartitionError, DataPlaneGoneError.
        """
        return self._measured("status", lambda: self._samples(partition_id))

    def usage(self) -> dict[str, OperationUsage]:
        """What this client did so far, by operation: a copy, picklable, for `usage.merge`."""
        with self._counting:
            return merge([self._usage])

    def metrics(self, others: Iterable[Mapping[str, OperationUsage]] = ()) -> dict[str, float]:
        """`usage` as flat numbers, and "data_plane/occupancy/<partition>" in samples for each partition that this client used.

        Args:
            others: usage of other clients, to be counted in.

        Raises:
            DataPlaneGoneError.
        """
        occupancy = {f"data_plane/occupancy/{name}": float(self.samples(name)) for name in self._partitions_used()}
        return flatten(merge([self.usage(), *others])) | occupancy

    def close(self) -> None:
        """Release this client. Idempotent. The partitions live on until their owner ends."""
        self._closed = True

    @abstractmethod
    def _register(self, partition_id: str, fields: Sequence[str], capacity: int | None, consumers: Sequence[str]) -> None: ...

    @abstractmethod
    def _put(self, meta: KVBatchMeta, columns: Mapping[str, Column], overwrite: bool) -> None: ...

    @abstractmethod
    def _get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]: ...

    @abstractmethod
    def _claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int, timeout_s: float) -> KVBatchMeta: ...

    @abstractmethod
    def _clear(self, meta: KVBatchMeta) -> None: ...

    @abstractmethod
    def _samples(self, partition_id: str) -> int: ...

    @abstractmethod
    def _partitions_used(self) -> list[str]: ...

    def _measured[T](self, operation: str, call: Callable[[], T], moved: Callable[[T], tuple[int, int]] = lambda _: (0, 0)) -> T:
        """The call's result, counted with what `moved` makes of it: rows, and bytes of column payload."""
        if self._closed:
            raise DataPlaneGoneError(f"{operation}: this data-plane client is closed")
        started = time.perf_counter()
        try:
            result = call()
        except BaseException:
            with self._counting:
                self._usage.setdefault(operation, OperationUsage()).errors += 1
            raise
        with self._counting:
            self._usage.setdefault(operation, OperationUsage()).add(*moved(result), time.perf_counter() - started)
        return result


def _payload(columns: Mapping[str, Column]) -> int:
    """Bytes of the elements of the columns that are tensors."""
    tensors = (rows for rows in columns.values() if len(rows) and isinstance(rows[0], torch.Tensor))
    return sum(sum(map(_NBYTES, rows)) for rows in tensors)
