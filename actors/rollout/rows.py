"""Rows of columns as one safetensors file, which anyone can read: no pickle, and not bound to the data plane that held them.

columns {name: n tensors of any shapes} ──► name: all elements, row by row    header: keys, the shape of each row, a text about them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from actors.checkpoints.errors import CheckpointError

_HEADER, _ABOUT = "rows", "about"


class _Header(BaseModel):
    """`shapes`: by column, of each row. `dtypes`: of columns that the format has no type for, and that are kept as bytes."""

    model_config = ConfigDict(extra="forbid")

    keys: tuple[str, ...]
    shapes: dict[str, tuple[tuple[NonNegativeInt, ...], ...]]
    dtypes: dict[str, str] = {}


_AS_BYTES = {torch.complex128, torch.float8_e8m0fnu}  # safetensors 0.8 has no name for them, or none that it can write everywhere


def write_rows(path: Path, keys: Sequence[str], columns: Mapping[str, Sequence[Any]], about: str = "") -> None:
    """
    Args:
        columns: by name, one tensor per key; those of a column are of one dtype.
        about: any text, which `read_about` gives back without reading the rows.

    Raises:
        CheckpointError: a column holds other values than tensors.
    """
    packed: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    dtypes: dict[str, str] = {}
    for name, rows in columns.items():
        if strange := {type(row).__name__ for row in rows if not isinstance(row, torch.Tensor)}:
            raise CheckpointError(f"{path.name}: column {name!r} holds {', '.join(sorted(strange))}: only tensors can be kept")
        shapes[name] = [tuple(row.shape) for row in rows]
        flat = torch.cat([row.reshape(-1) for row in rows]) if len(rows) else torch.empty(0)
        if flat.dtype in _AS_BYTES:
            dtypes[name], flat = str(flat.dtype).removeprefix("torch."), flat.view(torch.uint8)
        packed[name] = flat
    header = _Header(keys=tuple(keys), shapes={name: tuple(found) for name, found in shapes.items()}, dtypes=dtypes)
    save_file(packed, path, metadata={_HEADER: header.model_dump_json(), _ABOUT: about})


def read_rows(path: Path) -> tuple[tuple[str, ...], dict[str, list[torch.Tensor]]]:
    """The inverse of `write_rows`: keys, and columns with the bits, dtypes and shapes that they had.

    Raises:
        CheckpointError: no such file, or not what `write_rows` makes.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        header = _Header.model_validate_json(metadata.get(_HEADER, ""))
    except (OSError, SafetensorError, ValidationError) as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error}") from None
    if flat.keys() != header.shapes.keys():
        raise CheckpointError(f"{path.name}: columns {sorted(flat)}, its header describes {sorted(header.shapes)}")
    return header.keys, {name: _unpacked(path.name, name, tensor, header) for name, tensor in flat.items()}


def read_about(path: Path) -> str:
    """The text that `write_rows` was given.

    Raises:
        CheckpointError: no such file, or none of safetensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get(_ABOUT, ""))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error}") from None


def _unpacked(file: str, name: str, flat: torch.Tensor, header: _Header) -> list[torch.Tensor]:
    dtype = getattr(torch, header.dtypes[name], None) if name in header.dtypes else flat.dtype
    if dtype not in _AS_BYTES | {flat.dtype}:
        raise CheckpointError(f"{file}: column {name!r} is of type {header.dtypes[name]!r}")
    shapes = header.shapes[name]
    sizes = [prod(shape) for shape in shapes]
    if len(shapes) != len(header.keys) or sum(sizes) * dtype.itemsize != flat.nbytes:
        raise CheckpointError(
            f"{file}: column {name!r} has {flat.nbytes} bytes, {len(shapes)} rows of {sum(sizes) * dtype.itemsize} bytes for "
            f"{len(header.keys)} keys are described"
        )
    return [row.reshape(shape) for row, shape in zip(flat.view(dtype).split(sizes), shapes, strict=True)]
