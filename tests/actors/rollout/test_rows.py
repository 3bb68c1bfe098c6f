"""Rows as a safetensors file: every bit comes back, and what is not such a file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.checkpoints.errors import CheckpointError
from actors.rollout.rows import read_rows, write_rows

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=5)


def bits(row: torch.Tensor) -> bytes:
    return row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rows_of(dtype: torch.dtype, shapes: list[tuple[int, ...]], seed: int = 0) -> list[torch.Tensor]:
    """Any bits, NaN among them; of bool the two that there are."""
    source = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=source, dtype=torch.uint8)
        made.append(raw.view(dtype).reshape(shape))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=SHAPES.filter(bool), seed=st.integers(0, 99))
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype: torch.dtype, shapes: list[tuple[int, ...]], seed: int, tmp_path: Path) -> None:
    keys = tuple(f"v0_p{number}_g0" for number in range(len(shapes)))
    columns = {"ragged": rows_of(dtype, shapes, seed), "mask": rows_of(torch.bool, [(2,)] * len(shapes), seed)}
    write_rows(tmp_path / "rows", keys, columns)
    found, back = read_rows(tmp_path / "rows")
    assert found == keys
    assert back.keys() == columns.keys()
    for name, rows in columns.items():
        assert [(row.dtype, row.shape, bits(row)) for row in back[name]] == [(row.dtype, row.shape, bits(row)) for row in rows]


def test_no_rows_are_a_file_as_well(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", (), {"input_ids": []})
    assert read_rows(tmp_path / "rows") == ((), {"input_ids": []})
    write_rows(tmp_path / "rows", (), {})
    assert read_rows(tmp_path / "rows") == ((), {})


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    with pytest.raises(CheckpointError, match=r"column 'text' holds NoneType, str: only tensors"):
        write_rows(path, ("a", "b"), {"text": ["x", None]})
    with pytest.raises(CheckpointError, match=r"rows\.safetensors: cannot be read"):
        read_rows(path)
    write_rows(path, ("a", "b"), {"ids": rows_of(torch.int64, [(2,), (3,)])})
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"rows\.safetensors"):
            read_rows(path)
    size = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + size].decode()
    shapes = "[2],[3]"
    damages = [(shapes, "[2],[2]"), (shapes, "[2,3]"), (shapes, "[2],[x]"), ('a\\",\\"b', "abc"), ('\\"ids\\":', '\\"idz\\":')]
    for before, after in damages:
        assert before in header
        changed = header.replace(before, after).encode()
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + size :])
        with pytest.raises(CheckpointError, match=r"rows\.safetensors"):
            read_rows(path)


def test_other_people_s_safetensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "rows"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_rows(path)
    shapes = {"a": [[2]]}
    save_file({"a": torch.zeros(2)}, path, metadata={"rows": json.dumps({"keys": ["k"], "shapes": shapes, "dtypes": {"a": "save"}})})
    with pytest.raises(CheckpointError, match="column 'a' is of type 'save'"):
        read_rows(path)
