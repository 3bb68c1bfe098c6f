"""Two GPUs train as one does: data, tensor and pipeline parallelism over NCCL."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.policy import ParallelConfig
from tests.actors.policy import tiny
from tests.actors.policy.program import Job, run_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
LAYOUTS = {"DP2": ParallelConfig(data=2), "TP2": ParallelConfig(tensor=2), "PP2": ParallelConfig(pipeline=2)}
DTYPES = {"float32": 1e-4, "bfloat16": 2e-2}
BATCHING: dict[str, dict[str, Any]] = {
    "padded": {"mode": "padded", "micro_batch_size": 3},
    "packed": {"mode": "packed", "tokens_per_micro_batch": 64},
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`train(layout)`: three supervised steps of every dtype and batching, by "<dtype>-<batching>"."""
    model: Path = tiny.write_model(tmp_path_factory.mktemp("layouts") / "model", "qwen3", tied=True)

    @cache
    def run(layout: str) -> dict[str, list[dict[str, Any]]]:
        jobs = [
            Job(
                f"{dtype}-{mode}",
                str(model),
                ("sft", "sft", "sft", "export"),
                policy={"device": "cuda", "dtype": dtype, "batching": batching, "optimizer": {"lr": 1e-3, "clip_grad": 0.0}},
            )
            for dtype in DTYPES
            for mode, batching in BATCHING.items()
        ]
        return run_layout(LAYOUTS.get(layout, ParallelConfig()), jobs)

    return run


@pytest.mark.parametrize("mode", BATCHING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_train_as_one(train: Any, layout: str, dtype: str, mode: str) -> None:
    one, two = train("one")[f"{dtype}-{mode}"][0], train(layout)[f"{dtype}-{mode}"]
    for mine, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=DTYPES[dtype])
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5 * DTYPES[dtype])
    assert two[0]["metrics"] == two[1]["metrics"]
    if dtype == "float32":
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(two[0]["weights"][name], tensor, atol=1e-4, rtol=0)
