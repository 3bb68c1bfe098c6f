"""Rows of a column <-> what TransferQueue stores. Pure.

    scalars   [()  ()  () ]           ──► one dense tensor [n]
    vectors   [(3,) (0,) (5,)]        ──► jagged tensor; dense [n, L] when all lengths are equal
    arrays    [(2,3,4) (1,3,5)]       ──► flattened to vectors, plus a second stored field "<column>::shape"
    objects   ["a", None, {...}]      ──► pickled, as uint8 vectors

Every stored field so has rows of at most one dimension and one dtype for ever. TransferQueue 0.1.11 needs that: rows that
differ in a later dimension come back through logged fall-backs, and a batch whose dtype differs from the field's first one
is stored but silently never becomes readable. Bits, dtype and shape survive (bool, bfloat16, float8, complex, length 0).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from actors.data_plane.interface import Column, ColumnTypeError, RowCountError, UnknownFieldError
from actors.data_plane.meta import KVBatchMeta

SHAPE_SUFFIX = "::shape"


class Layout(StrEnum):
    """What the rows of a column are."""

    SCALAR = "scalar"
    VECTOR = "vector"
    ARRAY = "array"
    OBJECT = "object"


@dataclass(frozen=True)
class ColumnType:
    """The type of a column, fixed by its first put.

    Attributes:
        dtype: torch's name of it ("int64"); empty for objects.
    """

    layout: Layout
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.layout}:{self.dtype}"

    @staticmethod
    def parse(text: str) -> ColumnType:
        """The inverse of `str`."""
        layout, _, dtype = text.partition(":")
        return ColumnType(Layout(layout), dtype)

    def accepts(self, other: ColumnType) -> bool:
        """Whether rows of type `other` may be stored as this type: the same, or vectors and scalars among arrays."""
        return self == other or (self.layout is Layout.ARRAY and other.layout is not Layout.OBJECT and self.dtype == other.dtype)


@dataclass
class Schema:
    """What a partition may hold, and what is known of its columns' types so far."""

    fields: frozenset[str]
    capacity: int | None
    types: dict[str, ColumnType]

    def mask(self, names: Iterable[str]) -> int:
        """A set of columns as bits, in alphabetical order: small enough to ride with every sample."""
        order = sorted(self.fields)
        return sum(1 << order.index(name) for name in names)


def check_fields(partition_id: str, names: Sequence[str], schema: frozenset[str]) -> None:
    """Refuse columns that the partition's schema does not name.

    Raises:
        UnknownFieldError.
    """
    if unknown := [name for name in names if name not in schema]:
        known = ", ".join(sorted(schema))
        raise UnknownFieldError(f"partition {partition_id!r} has no column {unknown[0]!r}; its columns: {known}")


def check_columns(meta: KVBatchMeta, columns: Mapping[str, Column], schema: frozenset[str]) -> dict[str, ColumnType]:
    """The type of each column, when the columns fit the meta and the partition's schema.

    Raises:
        UnknownFieldError, RowCountError, ColumnTypeError.
    """
    where = f"partition {meta.partition_id!r}"
    check_fields(meta.partition_id, tuple(columns), schema)
    for name, rows in columns.items():
        if len(rows) != len(meta):
            raise RowCountError(f"{where}: column {name!r} has {len(rows)} rows for {len(meta)} keys")
    return {name: column_type(rows, f"{where}: column {name!r}") for name, rows in columns.items()} if len(meta) else {}


def check_type(known: ColumnType, given: ColumnType, where: str) -> None:
    """Refuse rows of another type than the column was first written with.

    Raises:
        ColumnTypeError.
    """
    if not known.accepts(given):
        raise ColumnTypeError(f"{where} was first written as {known}, these rows are {given}")


def column_type(rows: Column, where: str) -> ColumnType:
    """The type of at least one row.

    Raises:
        ColumnTypeError: mixed dtypes, tensors beside other values, or sparse, nested or quantized tensors.
    """
    tensors = [row for row in rows if isinstance(row, torch.Tensor)]
    if not tensors:
        return ColumnType(Layout.OBJECT)
    if len(tensors) < len(rows):
        raise ColumnTypeError(f"{where} holds tensors beside other values")
    dtypes = {row.dtype for row in tensors}
    if len(dtypes) > 1:
        raise ColumnTypeError(f"{where} holds several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    if any(row.layout is not torch.strided or row.is_nested or row.is_quantized for row in tensors):
        raise ColumnTypeError(f"{where} holds a sparse, nested or quantized tensor: dense ones only")
    dims = {row.dim() for row in tensors}
    layout = Layout.SCALAR if dims == {0} else Layout.VECTOR if dims == {1} else Layout.ARRAY
    return ColumnType(layout, str(dtypes.pop()).removeprefix("torch."))


def stored_fields(name: str, kind: ColumnType) -> tuple[str, ...]:
    """Names of the stored fields that hold one column."""
    return (name, name + SHAPE_SUFFIX) if kind.layout is Layout.ARRAY else (name,)


def encode(name: str, rows: Column, kind: ColumnType) -> dict[str, torch.Tensor]:
    """Stored fields of a column: dense [n] or [n, L], or jagged [n, *]. Always a copy, on the CPU.

    Raises:
        ColumnTypeError: a value that cannot be pickled.
    """
    if kind.layout is Layout.OBJECT:
        return {name: _pack([_pickled(name, row) for row in rows])}
    tensors = list(rows) if all(row.is_cpu for row in rows) else [row.cpu() for row in rows]
    if kind.layout is not Layout.ARRAY:
        return {name: _pack(tensors)}
    return {
        name: _pack([tensor.reshape(-1) for tensor in tensors]),
        name + SHAPE_SUFFIX: _pack([torch.tensor(tensor.shape, dtype=torch.int64) for tensor in tensors]),
    }


def decode(name: str, kind: ColumnType, stored: Mapping[str, torch.Tensor]) -> list[Any]:
    """Rows of a column from its stored fields. Tensor rows are views that do not overlap."""
    rows = list(stored[name].unbind())
    if kind.layout is Layout.OBJECT:
        return [pickle.loads(row.numpy().tobytes()) for row in rows]
    if kind.layout is Layout.ARRAY:
        shapes = stored[name + SHAPE_SUFFIX].unbind()
        return [row.reshape(shape.tolist()) for row, shape in zip(rows, shapes, strict=True)]
    return rows


def copy_row(name: str, row: Any) -> Any:
    """A CPU copy of one value that shares nothing with it.

    Raises:
        ColumnTypeError: a value that cannot be pickled.
    """
    if isinstance(row, torch.Tensor):
        return row.detach().to("cpu", copy=True).contiguous()
    return pickle.loads(_dumps(name, row))


@torch.no_grad()
def _pack(rows: list[torch.Tensor]) -> torch.Tensor:
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _pickled(name: str, row: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(_dumps(name, row)), dtype=torch.uint8)


def _dumps(name: str, row: Any) -> bytes:
    try:
        return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ColumnTypeError(f"column {name!r}: a {type(row).__name__} cannot be pickled: {error}") from error
