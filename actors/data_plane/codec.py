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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

import torch

from actors.data_plane.interface import Column, ColumnTypeError

SHAPE_SUFFIX = "::shape"
_KIND = attrgetter("dtype", "layout", "is_nested", "is_meta", "ndim")
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
        ColumnTypeError: mixed dtypes, tensors beside other values, or sparse, nested, quantized or meta tensors.
    """
    return {name: _column_type(rows, f"partition {partition_id!r}: column {name!r}") for name, rows in columns.items()}


def check_types(partition_id: str, known: Mapping[str, ColumnType], given: Mapping[str, ColumnType]) -> None:
    """Raises: ColumnTypeError (rows of another type than their column was first written with)."""
    for name, kind in given.items():
        if name in known and not known[name].accepts(kind):
            raise ColumnTypeError(f"partition {partition_id!r}: column {name!r} was first written as {known[name]}, these rows are {kind}")


def _column_type(rows: Column, where: str) -> ColumnType:
    tensors = [isinstance(row, torch.Tensor) for row in rows]
    if not any(tensors):
        return ColumnType(Layout.OBJECT)
    if not all(tensors):
        raise ColumnTypeError(f"{where} holds tensors beside other values")
    kinds = set(map(_KIND, rows))
    dtypes = sorted({str(dtype).removeprefix("torch.") for dtype, *_ in kinds})
    if len(dtypes) > 1:
        raise ColumnTypeError(f"{where} holds several dtypes: {', '.join(dtypes)}")
    if any(layout is not torch.strided or nested or meta or dtype in _QUANTIZED for dtype, layout, nested, meta, _ in kinds):
        raise ColumnTypeError(f"{where} holds a sparse, nested, quantized or meta tensor: dense ones with values only")
    dims = {ndim for *_, ndim in kinds}
    return ColumnType(Layout.SCALAR if dims == {0} else Layout.VECTOR if dims == {1} else Layout.ARRAY, dtypes[0])


def encode(name: str, rows: Column, kind: ColumnType) -> dict[str, list[torch.Tensor]]:
    """Stored fields of a column: rows of at most one dimension, on the CPU. They may be views of what was given.

    Raises:
        ColumnTypeError: a value that cannot be pickled.
    """
    if kind.layout is Layout.OBJECT:
        return {name: [torch.frombuffer(bytearray(pickled(f"column {name!r}", row)), dtype=torch.uint8) for row in rows]}
    tensors = list(rows) if all(row.is_cpu for row in rows) else [row.cpu() for row in rows]
    if kind.layout is not Layout.ARRAY:
        return {name: tensors}
    shapes = [torch.tensor(tensor.shape, dtype=torch.int64) for tensor in tensors]
    return {name: [tensor.reshape(-1) for tensor in tensors], name + SHAPE_SUFFIX: shapes}


@torch.no_grad()
def pack(rows: list[torch.Tensor], out: torch.Tensor) -> None:
    """Write rows of one dtype as they travel and are kept: jagged, one after another, never padded.

    Args:
        out: uint8, [bytes of all rows], aligned for the dtype.
    """
    join = torch.stack if rows[0].ndim == 0 else torch.cat
    join(rows, out=out.view(rows[0].dtype))


def unpack(packed: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype, scalar: bool) -> Sequence[torch.Tensor]:
    """The inverse of `pack`. Rows are views that do not overlap."""
    if packed.data_ptr() % dtype.itemsize:  # a network frame may start anywhere
        packed = packed.clone()
    whole = packed.view(dtype)
    if scalar:
        return whole.unbind()
    rows: Sequence[torch.Tensor] = whole.split([length // dtype.itemsize for length in lengths])
    return rows


def stored_types(name: str, kind: ColumnType) -> dict[str, tuple[torch.dtype, bool]]:
    """The stored fields that hold one column, each with the dtype of its rows and whether they are scalars."""
    match kind.layout:
        case Layout.OBJECT:
            return {name: (torch.uint8, False)}
        case Layout.ARRAY:
            return {name: (getattr(torch, kind.dtype), False), name + SHAPE_SUFFIX: (torch.int64, False)}
    return {name: (getattr(torch, kind.dtype), kind.layout is Layout.SCALAR)}


def decode(name: str, kind: ColumnType, stored: Mapping[str, list[torch.Tensor]]) -> list[Any]:
    """Rows of a column from the rows of its stored fields. Tensors share memory with what is given."""
    rows = stored[name]
    if kind.layout is Layout.OBJECT:
        return [pickle.loads(row.numpy().data) for row in rows]
    if kind.layout is Layout.ARRAY:
        return [row.reshape(shape.tolist()) for row, shape in zip(rows, stored[name + SHAPE_SUFFIX], strict=True)]
    return rows


def copy_row(name: str, row: Any) -> Any:
    """A CPU copy of one value that shares nothing with it.

    Raises:
        ColumnTypeError: a value that cannot be pickled.
    """
    if isinstance(row, torch.Tensor):
        return row.detach().to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()
    return pickle.loads(pickled(f"column {name!r}", row))


def pickled(what: str, value: Any) -> bytes:
    """Any plain value as bytes.

    Raises:
        ColumnTypeError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ColumnTypeError(f"{what}: a {type(value).__name__} cannot be pickled: {error}") from error
