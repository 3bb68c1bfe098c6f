"""What a partition may hold, and the checks of every call against it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from actors.data_plane.interface import RowCountError, UnknownConsumerError, UnknownFieldError, UnsatisfiableClaimError
from actors.data_plane.meta import KVBatchMeta
from configs.base import did_you_mean

_MAX_FIELDS = 63  # bits of `Schema.mask`, an int64 in MessagePack


@dataclass(frozen=True)
class Schema:
    """A partition as it was registered.

    Attributes:
        fields: its columns.
        capacity: most samples held at once, or None.
        consumers: tasks that may claim its samples, each with a cursor of its own.
    """

    fields: frozenset[str]
    capacity: int | None = None
    consumers: frozenset[str] = frozenset()

    @staticmethod
    def build(partition_id: str, fields: Sequence[str], capacity: int | None, consumers: Sequence[str]) -> Schema:
        """Raises: ValueError (no columns, more than 63, a doubled or reserved name ("::" inside), or a capacity below 1)."""
        where = f"partition {partition_id!r}"
        schema = Schema(frozenset(fields), capacity, frozenset(consumers))
        if not 1 <= len(schema.fields) <= _MAX_FIELDS or len(schema.fields) != len(fields):
            raise ValueError(f"{where}: needs 1 to {_MAX_FIELDS} columns, each named once; got {list(fields)}")
        if len(schema.consumers) != len(consumers) or "" in schema.consumers:
            raise ValueError(f"{where}: consumers need names, each given once; got {list(consumers)}")
        if reserved := [name for name in (partition_id, *sorted(schema.fields), *sorted(schema.consumers)) if "::" in name]:
            raise ValueError(f"{where}: '::' in {reserved[0]!r} is reserved")
        if capacity is not None and capacity < 1:
            raise ValueError(f"{where}: a capacity of {capacity} holds nothing")
        return schema

    def check_fields(self, partition_id: str, names: Sequence[str]) -> None:
        """Raises: UnknownFieldError (columns that the partition cannot have)."""
        for name in names:
            if name not in self.fields:
                hint = did_you_mean(name, self.fields, f"its columns: {', '.join(sorted(self.fields))}")
                raise UnknownFieldError(f"partition {partition_id!r} has no column {name!r}; {hint}")

    def check_put(self, meta: KVBatchMeta, columns: Mapping[str, Sequence[object]]) -> None:
        """Raises: UnknownFieldError, RowCountError (columns, lengths or tags that do not fit the keys)."""
        where, n = f"partition {meta.partition_id!r}", len(meta)
        self.check_fields(meta.partition_id, tuple(columns))
        for name, rows in columns.items():
            if len(rows) != n:
                raise RowCountError(f"{where}: column {name!r} has {len(rows)} rows for {n} keys")
        # The constructor of a meta checks these two, but model_copy and model_construct do not.
        for name, values in (("tags", meta.tags), ("sequence_lengths", meta.sequence_lengths)):
            if len(values) not in (0, n):
                raise RowCountError(f"{where}: {len(values)} {name} for {n} keys")

    def mask(self, names: Iterable[str]) -> int:
        """A set of columns as the bits of one integer: small enough to ride with every sample. Other names have no bit."""
        return sum(self._bits.get(name, 0) for name in names)

    @cached_property
    def _bits(self) -> dict[str, int]:
        return {name: 1 << place for place, name in enumerate(sorted(self.fields))}

    def check_claim(self, partition_id: str, consumer: str, fields: Sequence[str], count: int) -> None:
        """Raises: UnknownConsumerError, UnknownFieldError, UnsatisfiableClaimError (no put could ever satisfy the claim)."""
        where = f"partition {partition_id!r}"
        if consumer not in self.consumers:
            raise UnknownConsumerError(f"{where} has no consumer {consumer!r}; registered: {', '.join(sorted(self.consumers)) or 'none'}")
        self.check_fields(partition_id, fields)
        if not fields:
            raise UnsatisfiableClaimError(f"{where}: consumer {consumer!r} must name at least one column to claim by")
        if count < 1 or (self.capacity is not None and count > self.capacity):
            most = "without bound" if self.capacity is None else f"at most {self.capacity}"
            raise UnsatisfiableClaimError(f"{where}: consumer {consumer!r} cannot claim {count} samples at once; it holds {most}")
