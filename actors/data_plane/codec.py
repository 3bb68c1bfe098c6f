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
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from actors.data_plane.interface import Column, ColumnTypeError

SHAPE_SUFFIX = "::shape"
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


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


def column_types(partition_id: str, columns: Mapping[str, Column]) -> dict[str, ColumnType]:
    """The type of each column of at least one row.

    Raises:
        ColumnTypeError.
    """
    return {name: column_type(rows, f"partition {partition_id!r}: column {name!r}") for name, rows in columns.items()}


def check_types(partition_id: str, known: Mapping[str, ColumnType], given: Mapping[str, ColumnType]) -> None:
    """Refuse rows of another type than their column was first written with.

    Raises:
        ColumnTypeError.
    """
    for name, kind in given.items():
        if name in known and not known[name].accepts(kind):
            raise ColumnTypeError(f"partition {partition_id!r}: column {name!r} was first written as {known[name]}, these rows are {kind}")


def column_type(rows: Column, where: str) -> ColumnType:
    """The type of at least one row.

    Raises:
        ColumnTypeError: mixed dtypes, tensors beside other values, or sparse, nested or quantized tensors.
    """
    kinds = {isinstance(row, torch.Tensor) for row in rows}
    if kinds == {False}:
        return ColumnType(Layout.OBJECT)
    if kinds != {True}:
        raise ColumnTypeError(f"{where} holds tensors beside other values")
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        raise ColumnTypeError(f"{where} holds several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    dtype = dtypes.pop()
    if {row.layout for row in rows} != {torch.strided} or dtype in _QUANTIZED or any(row.is_nested for row in rows):
        raise ColumnTypeError(f"{where} holds a sparse, nested or quantized tensor: dense ones only")
    dims = {row.ndim for row in rows}
    layout = Layout.SCALAR if dims == {0} else Layout.VECTOR if dims == {1} else Layout.ARRAY
    return ColumnType(layout, str(dtype).removeprefix("torch."))


def stored_fields(name: str, kind: ColumnType) -> tuple[str, ...]:
    """Names of the stored fields that hold one column."""
    return (name, name + SHAPE_SUFFIX) if kind.layout is Layout.ARRAY else (name,)


def encode(name: str, rows: Column, kind: ColumnType) -> dict[str, list[torch.Tensor]]:
    """Stored fields of a column: rows of at most one dimension, contiguous, on the CPU. They may be views of what was given.

    Raises:
        ColumnTypeError: a value that cannot be pickled.
    """
    if kind.layout is Layout.OBJECT:
        return {name: [torch.frombuffer(bytearray(pickled(f"column {name!r}", row)), dtype=torch.uint8) for row in rows]}
    tensors = [_plain(row) for row in rows]
    if kind.layout is not Layout.ARRAY:
        return {name: tensors}
    shapes = [torch.tensor(tensor.shape, dtype=torch.int64) for tensor in tensors]
    return {name: [tensor.reshape(-1) for tensor in tensors], name + SHAPE_SUFFIX: shapes}


def payload(columns: Mapping[str, Column]) -> int:
    """Bytes of the elements of the columns that are tensors."""
    return sum(row.nbytes for rows in columns.values() for row in rows if isinstance(row, torch.Tensor))


def pack(rows: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Rows as they go on the wire: one dense block when their lengths are equal, else row by row. Never padded."""
    return torch.stack(rows) if len({row.shape for row in rows}) == 1 else rows


def decode(name: str, kind: ColumnType, stored: Mapping[str, list[torch.Tensor]]) -> list[Any]:
    """Rows of a column from its stored fields. Tensors share memory with what is given."""
    rows = stored[name]
    if kind.layout is Layout.OBJECT:
        return [pickle.loads(row.numpy().tobytes()) for row in rows]
    if kind.layout is Layout.ARRAY:
        return [row.reshape(shape.tolist()) for row, shape in zip(rows, stored[name + SHAPE_SUFFIX], strict=True)]
    return rows


def copy_row(name: str, row: Any) -> Any:
    """A CPU copy of one value that shares nothing with it.

    Raises:
        ColumnTypeError: a value that cannot be pickled.
    """
    if isinstance(row, torch.Tensor):
        return row.detach().to("cpu", copy=True).contiguous()
    return pickle.loads(pickled(f"column {name!r}", row))


def _plain(row: torch.Tensor) -> torch.Tensor:
    if row.requires_grad:
        row = row.detach()
    return (row if row.is_cpu else row.cpu()).contiguous().resolve_conj().resolve_neg()


def pickled(what: str, value: Any) -> bytes:
    """Any plain value as bytes.

    Raises:
        ColumnTypeError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ColumnTypeError(f"{what}: a {type(value).__name__} cannot be pickled: {error}") from error
