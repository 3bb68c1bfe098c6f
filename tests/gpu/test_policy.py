"""The policy worker on CUDA: log-probabilities and training against transformers. Run by `make gpu-check`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.sharding import plan_batch
from actors.heap import freeze_heap
from actors.policy.worker import PolicyWorker
from configs.policy import PolicyConfig
from tests.actors.policy import reference, tiny
from tests.actors.policy.program import optimizer_tensors

pytestmark = pytest.mark.gpu
KINDS = [("llama", False), ("qwen2", True), ("qwen3", True)]
BATCHING: list[dict[str, Any]] = [
    {"mode": "padded", "micro_batch_size": 4},
    {"mode": "dynamic", "tokens_per_micro_batch": 48},
    {"mode": "packed", "tokens_per_micro_batch": 48},
]
FIELDS = ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "advantages", "policy_logprobs")


@contextmanager
def worker(config: PolicyConfig, model: Path, plane: MemoryPlane, directory: Path) -> Iterator[PolicyWorker]:
    """A set-up worker, alone in its group."""
    made = PolicyWorker(config, str(model), 0, plane, seed=0, temperature=0.8)
    made.setup(f"file://{directory}/rendezvous")
    try:
        yield made
    finally:
        made.close()


def loaded(vocab: int = 96) -> tuple[MemoryPlane, Any, dict[str, list[torch.Tensor]]]:
    """A plane with one batch in it."""
    plane = MemoryPlane()
    plane.register_partition("train", fields=FIELDS)
    meta, columns = tiny.batch(5, vocab)
    return plane, plane.put(meta, columns), columns


@pytest.mark.parametrize(("kind", "tied"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("batching", BATCHING, ids=lambda options: options["mode"])
def test_logprobs_equal_transformers(kind: str, tied: bool, dtype: str, batching: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", kind, tied=tied)
    plane, meta, columns = loaded()
    config = PolicyConfig(device="cuda", dtype=dtype, batching=batching)
    with worker(config, model, plane, tmp_path) as policy:
        plan = plan_batch(meta, config.batching, data_parallel=1).shards[0]
        policy.logprob(plan, "policy_logprobs")
    ours = plane.get(meta, ["policy_logprobs"])["policy_logprobs"]
    hf = reference.load(str(model)).cuda()
    errors = []
    for ids, mask, mine in zip(columns["input_ids"], columns["token_mask"], ours, strict=True):
        theirs = reference.logprobs(hf, ids.cuda(), 0.8).detach().cpu()
        errors.append((mine - theirs)[mask].abs())
    error = torch.cat(errors)
    if dtype == "float32":
        assert error.max() < 1e-4
    else:
        assert error.mean() < (2e-2 if dtype == "bfloat16" else 3e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_lowers_the_supervised_loss(dtype: str, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen3", tied=True)
    plane, meta, _ = loaded()
    config = PolicyConfig(device="cuda", dtype=dtype, optimizer={"lr": 1e-2})
    with worker(config, model, plane, tmp_path) as policy:
        plan = plan_batch(meta, config.batching, data_parallel=1).shards[0]
        steps = [policy.train(plan, "sft") for _ in range(10)]
    losses = [step["loss"] for step in steps]
    assert not any(step.get("skipped_steps") for step in steps)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replaced_optimizer_leaves_no_tensor(dtype: str, tmp_path: Path) -> None:
    """No collection would find them: they are frozen, as in an actor."""
    model = tiny.write_model(tmp_path / "model", "qwen3", tied=True)
    plane, meta, _ = loaded()
    config = PolicyConfig(device="cuda", dtype=dtype)
    with worker(config, model, plane, tmp_path) as policy:
        policy.train(plan_batch(meta, config.batching, data_parallel=1).shards[0], "sft")
        old = [weakref.ref(tensor) for tensor in optimizer_tensors(policy)]
        freeze_heap()
        policy.reset_optimizer(config.optimizer)
        freed = [tensor() is None for tensor in old]
    assert len(freed) > 20
    assert all(freed)
