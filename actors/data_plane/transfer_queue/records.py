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
from actors.data_plane.schema import Schema

SHADOW = "schema::"


@dataclass(frozen=True)
class Record:
    """What is known of a partition: its schema, and the types of the columns that were written."""

    schema: Schema
    types: dict[str, ColumnType]

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
        return None if schema is None else Record(schema, types)


def schema_key(schema: Schema) -> str:
    """The key that registers a schema."""
    text = {"fields": sorted(schema.fields), "capacity": schema.capacity, "consumers": sorted(schema.consumers)}
    return f"::{json.dumps(text)}"


def type_key(name: str, kind: ColumnType) -> str:
    """The key that fixes a column's type."""
    return f"{name}::{kind}"
