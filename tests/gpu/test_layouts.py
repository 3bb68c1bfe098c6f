"""Two GPUs train as one does: data, tensor, pipeline and context parallelism over NCCL."""

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
LAYOUTS = {
    "DP2": ParallelConfig(data=2),
    "TP2": ParallelConfig(tensor=2),
    "PP2": ParallelConfig(pipeline=2),
    "CP2": ParallelConfig(context=2),
}
DTYPES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
BATCHING: dict[str, dict[str, Any]] = {
    "padded": {"mode": "padded", "micro_batch_size": 3},
    "packed": {"mode": "packed", "tokens_per_micro_batch": 256},
    # Whole tiles for the two chunks of either rank: Transformer Engine gets rows, not slots.
    "dense": {"mode": "padded", "micro_batch_size": 3, "token_buckets": [512]},
}
CASES = [(layout, dtype, mode) for layout in LAYOUTS for dtype in DTYPES for mode in BATCHING if (layout, dtype) != ("CP2", "float32")]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`train(layout)`: log-probabilities and three supervised steps of every dtype and batching, by "<dtype>-<batching>"."""
    directory = tmp_path_factory.mktemp("layouts") / "model"
    model: Path = tiny.write_model(directory, "qwen3", tied=True, max_position_embeddings=512)

    @cache
    def run(layout: str) -> dict[str, list[dict[str, Any]]]:
        jobs = [
            Job(
                f"{dtype}-{mode}",
                str(model),
                ("logprob", "sft", "sft", "sft", "export"),
                longest=80,  # so that context parallelism's later chunks hold tokens too
                policy={"device": "cuda", "dtype": dtype, "batching": BATCHING[mode], "optimizer": {"lr": 1e-3, "clip_grad": 0.0}},
            )
            for dtype in DTYPES
            for mode in BATCHING
            if layout == "one" or (layout, dtype, mode) in CASES
        ]
        return run_layout(LAYOUTS.get(layout, ParallelConfig()), jobs)

    return run


@pytest.mark.parametrize(("layout", "dtype", "mode"), CASES)
def test_two_gpus_train_as_one(train: Any, layout: str, dtype: str, mode: str) -> None:
    one, two = train("one")[f"{dtype}-{mode}"][0], train(layout)[f"{dtype}-{mode}"]
    off = torch.cat([(two[0]["policy_logprobs"][key] - expected).abs() for key, expected in one["policy_logprobs"].items()])
    assert off.mean() < DTYPES[dtype]
    assert off.max() < 5 * DTYPES[dtype]  # of a token that saw others, it would be 1 and more
    for mine, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=DTYPES[dtype])
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5 * DTYPES[dtype])
    assert of_all(two[0]) == of_all(two[1])
    if dtype == "float32":
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(two[0]["weights"][name], tensor, atol=1e-4, rtol=0)


def of_all(result: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of every step that are the same on all ranks: not their memory."""
    return [{name: value for name, value in step.items() if not name.startswith("gpu_memory/")} for step in result["metrics"]]
