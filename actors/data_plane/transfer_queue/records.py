"""A partition's schema and column types, as keys of a shadow partition. Pure.

    partition "train"  ◄──  shadow "schema::train":  ::{"fields": [...], "capacity": 8, ...}     its schema
                                                     reward::scalar:float32                      a column's type
                                                     input_ids::vector:int64

TransferQueue creates keys atomically and lists them in order of creation, so of two processes that register or write at the
same time the first decides, for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from actors.data_plane.codec import ColumnType
from actors.data_plane.schema import MAX_FIELDS, Schema

SHADOW = "schema::"


@dataclass(frozen=True)
class Record:
    """What is known of a partition.

    Attributes:
        types: of the columns that were written.
        order: its columns; the position of one is its bit in the `columns` of a sample. It only ever grows.
    """

    schema: Schema
    types: dict[str, ColumnType]
    order: tuple[str, ...]

    @staticmethod
    def parse(keys: Iterable[str]) -> Record | None:
        """The record, from the shadow partition's keys in order of creation; None before a schema is there."""
        schema, types = None, dict[str, ColumnType]()
        for key in keys:
            name, _, text = key.partition("::")
            if name:
                types.setdefault(name, ColumnType.parse(text))
            elif schema is None:
                given = json.loads(text)
                schema = Schema(frozenset(given["fields"]), given["capacity"], frozenset(given["consumers"]))
        if schema is None:
            return None
        extra = (name for name in types if name not in schema.fields)
        return Record(schema, types, (*sorted(schema.fields), *extra)[:MAX_FIELDS])

    def mask(self, names: Iterable[str]) -> int:
        """A set of columns as bits: small enough to ride with every sample. Columns without a bit count as not written."""
        return sum(1 << self.order.index(name) for name in names if name in self.order)


def schema_key(schema: Schema) -> str:
    """The key that registers a schema."""
    text = {
        "fields": sorted(schema.fields),
        "capacity": schema.capacity,
        "consumers": sorted(schema.consumers),
    }
    return f"::{json.dumps(text)}"


def type_key(name: str, kind: ColumnType) -> str:
    """The key that fixes a column's type."""
    return f"{name}::{kind}"
