"""What is kept of a step: it comes back as it was, or is refused by name; and goes when nothing could come to the step any more."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from actors.rollout.inputs import StepInputs, path_of, remove, steps_in

LENGTHS = (4, 2, 3)


def inputs_of(step: int, config: str = "") -> tuple[StepInputs, dict[str, list[torch.Tensor]]]:
    """Three rows, two of them of one group."""
    meta = KVBatchMeta(
        partition_id="train",
        keys=("v0_pb_g0", "v0_pa_g0", "v0_pb_g1"),  # an order of its own
        sequence_lengths=LENGTHS,
        tags=tuple({"prompt_uid": uid, "weight_version": 0, "reward": reward} for uid, reward in (("b", 0.5), ("a", 1.0), ("b", 0.0))),
    )
    columns = {
        "input_ids": [torch.arange(length) for length in LENGTHS],
        "generation_logprobs": [-torch.arange(length, dtype=torch.float32) / 3 for length in LENGTHS],
        "advantages": [torch.tensor(value) for value in (1.0, 0.0, -1.0)],
    }
    inputs = StepInputs(
        step=step, weight_version=step - 1, meta=meta.with_fields("input_ids", "generation_logprobs"), trained=(2, 0), passed_over=False,
        rate=0.5, metrics={}, config=config, place="here",
    )  # fmt: skip
    return inputs.ended(["advantages"], {"loss": math.nan, "kl": 0.1}), columns


def test_a_step_comes_back(tmp_path: Path) -> None:
    inputs, columns = inputs_of(12)
    inputs.write(tmp_path / "inputs", columns)
    found = StepInputs.read(path_of(tmp_path / "inputs", 12))
    assert found.model_dump(exclude={"metrics"}) == inputs.model_dump(exclude={"metrics"})
    assert found.meta.fields == columns.keys()
    assert (math.isnan(found.metrics["loss"]), found.metrics["kl"]) == (True, 0.1)
    back = found.columns(tmp_path / "inputs")
    for name, rows in columns.items():
        assert all(torch.equal(mine, theirs) and mine.dtype == theirs.dtype for mine, theirs in zip(back[name], rows, strict=True))


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    inputs, columns = inputs_of(12)
    inputs.write(tmp_path, columns | {"generation_logprobs": columns["generation_logprobs"][::-1]})
    with pytest.raises(CheckpointError, match=r"step-000012.*'generation_logprobs' has rows of other lengths"):
        inputs.columns(tmp_path)
    inputs.write(tmp_path, {name: columns[name] for name in ("input_ids", "advantages")})
    with pytest.raises(CheckpointError, match="rows or columns are not those"):
        inputs.columns(tmp_path)
    path_of(tmp_path, 12).write_bytes(b"none")
    with pytest.raises(CheckpointError, match=r"step-000012\.safetensors"):
        StepInputs.read(path_of(tmp_path, 12))


def test_what_cannot_be_written_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    inputs, columns = inputs_of(12)
    (tmp_path / ".step-000012.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        inputs.write(tmp_path, columns)
    assert steps_in(tmp_path) == []


def test_steps_go_by_their_numbers(tmp_path: Path) -> None:
    assert steps_in(tmp_path / "inputs") == []
    remove(tmp_path / "inputs", after=0)
    for step in (1, 2, 3, 10, 1_000_000):
        inputs, columns = inputs_of(step)
        inputs.write(tmp_path / "inputs", columns)
    remove(tmp_path / "inputs", after=0, until=2)
    assert steps_in(tmp_path / "inputs") == [3, 10, 1_000_000]
    remove(tmp_path / "inputs", after=3)
    assert steps_in(tmp_path / "inputs") == [3]
