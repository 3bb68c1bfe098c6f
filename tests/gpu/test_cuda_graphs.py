"""Replayed passes equal eager ones bit for bit: twenty steps of changing lengths, log-probabilities and training, in every layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.sharding import plan_batch
from configs.loader import load, preset_names
from configs.loss import LossConfig
from configs.policy import PolicyConfig
from tests.actors.policy import tiny
from tests.gpu.test_policy import FIELDS, worker

pytestmark = pytest.mark.gpu
STEPS, ROWS = 20, 8
# Rows of whole tiles ("dense") stay dense in Transformer Engine's attention, all others are slots of a packed row (packing.py).
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "padded", "micro_batch_size": 4, "token_buckets": [128, 256, 384]},
    "padded": {"mode": "padded", "micro_batch_size": 4, "token_buckets": [16, 32, 48]},
    "dynamic": {"mode": "dynamic", "tokens_per_micro_batch": 96, "token_buckets": [8, 16, 32, 48], "sequence_buckets": [1, 2, 4, 8]},
    "packed": {"mode": "packed", "tokens_per_micro_batch": 96, "token_buckets": [48, 96], "sequence_buckets": [4, 8]},
}


# Weights that differ by row, and from step to step: data of one graph.
MIXTURE: dict[str, Any] = {
    "importance_sampling": "token",
    "target_entropy": 9.0,
    "entropy_coef_step": 0.01,
    "sources": {"b": {"policy_gradient_coef": 0.5, "cross_entropy_coef": 0.3}},
}


@dataclass
class Run:
    """What twenty steps gave."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def run(
    model: Path,
    directory: Path,
    layout: str,
    dtype: str,
    impl: str,
    loss: Any = MIXTURE,
    steps: int = STEPS,
    older: bool = False,
) -> Run:
    """Args: older: the ratio is to the engine's log-probabilities, far from the policy's: to its own, every loss would be the same."""
    config = PolicyConfig(
        device="cuda", dtype=dtype, batching=LAYOUTS[layout], cuda_graph={"impl": impl, "warmup_steps": 2},
        optimizer={"lr": 1e-3}, loss=loss, recompute_logprobs="always",
        loss_scale={"initial": 2.0**24, "growth_steps": 4},  # of float16: overflows, and a scale that changes under the graphs
    )  # fmt: skip
    plane, seen = MemoryPlane(), Run()
    plane.register_partition("train", fields=(*FIELDS, "reference_logprobs"))
    with worker(config, model, plane, directory) as policy:
        if config.why_no_ref_logprob() is None:
            policy.snapshot_reference()
        for step in range(steps):
            longest = 4 + (45 if layout == "dense" else 6) * (step % 7)
            meta, columns = tiny.batch(step, 96, rows=ROWS, longest=longest)
            if older:
                columns["policy_logprobs"] = columns["generation_logprobs"]
            meta = plane.put(meta, columns)
            if not older:
                policy.logprob(plan_batch(meta, config.batching, data_parallel=1).shards[0], "policy_logprobs")
                meta = meta.with_fields("policy_logprobs")
            seen.logprobs += plane.get(meta, ["policy_logprobs"])["policy_logprobs"]
            if config.why_no_ref_logprob() is None:
                policy.logprob(plan_batch(meta, config.batching, data_parallel=1).shards[0], "reference_logprobs", True)
                meta = meta.with_fields("reference_logprobs")
            metrics = policy.train(plan_batch(meta, config.batching, data_parallel=1).shards[0], "grpo")
            counts = {name: metrics.pop(name) for name in list(metrics) if name.startswith("cuda_graph/")}
            metrics = {name: value for name, value in metrics.items() if not name.startswith("gpu_memory/")}  # graphs have pools
            seen.metrics.append(metrics)
            seen.counts.append(counts)
            plane.clear(meta)
        seen.weights = policy.export_weights() or {}
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_equals_eager_bit_for_bit(layout: str, dtype: str, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen3", tied=True, max_position_embeddings=512)
    (tmp_path / "eager").mkdir()
    (tmp_path / "graphs").mkdir()
    eager = run(model, tmp_path / "eager", layout, dtype, "none")
    graphs = run(model, tmp_path / "graphs", layout, dtype, "full_iteration")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(graphs.logprobs, eager.logprobs, strict=True))
    assert graphs.metrics == eager.metrics
    for name, tensor in eager.weights.items():
        assert torch.equal(graphs.weights[name], tensor), name
    if dtype == "float16":
        assert 0 < sum(step["skipped_steps"] for step in graphs.metrics) < STEPS
        assert len({step["loss_scale"] for step in graphs.metrics}) > 2
    assert not eager.counts[0]
    total = {name: sum(step[name] for step in graphs.counts) for name in graphs.counts[0]}
    assert total["cuda_graph/replays"] > total["cuda_graph/eager"]
    assert total["cuda_graph/captures"] >= 4  # two shapes at least, in two stages
    assert total["cuda_graph/dropped"] == 0


def losses() -> list[Any]:
    """Those of the presets that learn from rewards, each with a KL to the reference."""
    found = {}
    for name in preset_names():
        loss = load("arithmetic-cpu", [f"preset={name}"]).policy.loss
        if loss.policy_gradient_coef:
            found[name] = loss.model_copy(update={"kl_coef": 0.1})
    return [pytest.param(loss, id=name) for name, loss in found.items()]


@pytest.mark.parametrize("loss", losses())
def test_each_loss_replays_as_it_is_eager(loss: LossConfig, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen3", tied=True, max_position_embeddings=512)
    seen = {}
    for impl in ("none", "full_iteration"):
        (tmp_path / impl).mkdir()
        seen[impl] = run(model, tmp_path / impl, "packed", "bfloat16", impl, loss, steps=8, older=True)
    eager, graphs = seen.values()
    assert graphs.metrics == eager.metrics
    assert all(torch.equal(graphs.weights[name], tensor) for name, tensor in eager.weights.items())
    assert sum(step["cuda_graph/replays"] for step in graphs.counts) > 0


def test_weights_that_move_are_captured_anew(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen3", tied=True)
    config = PolicyConfig(
        device="cuda", dtype="bfloat16", batching=LAYOUTS["padded"], cuda_graph={"impl": "full_iteration", "warmup_steps": 1}
    )
    plane = MemoryPlane()
    plane.register_partition("train", fields=FIELDS)
    meta, columns = tiny.batch(5, 96, rows=ROWS)
    meta = plane.put(meta, columns)
    with worker(config, model, plane, tmp_path) as policy:
        plan = plan_batch(meta, config.batching, data_parallel=1).shards[0]

        def logprobs() -> tuple[dict[str, float], list[torch.Tensor]]:
            policy.logprob(plan, "policy_logprobs")
            return policy._passes.counts(), plane.get(meta.with_fields("policy_logprobs"), ["policy_logprobs"])["policy_logprobs"]

        logprobs()
        before, old = logprobs()
        assert before["cuda_graph/replays"] == 2
        with torch.no_grad():
            for parameter in policy._bare.parameters():
                parameter.data = parameter.data * 1.5  # new memory, new values
        moved, eager = logprobs()
        again, replayed = logprobs()
    assert (moved["cuda_graph/dropped"], moved["cuda_graph/captures"], again["cuda_graph/replays"]) == (1, 1, 2)
    assert not torch.equal(torch.cat(old), torch.cat(eager))
    assert torch.equal(torch.cat(eager), torch.cat(replayed))


def test_supervised_steps_replay_the_graphs_of_grpo_steps(tmp_path: Path) -> None:
    """Objectives differ in their weight columns only; the results are those of eager supervised steps, bit for bit."""
    model = tiny.write_model(tmp_path / "model", "qwen3", tied=True)
    found = {}
    for impl in ("none", "full_iteration"):
        config = PolicyConfig(
            device="cuda", dtype="bfloat16", batching=LAYOUTS["padded"], cuda_graph={"impl": impl, "warmup_steps": 1},
            optimizer={"lr": 1e-3}, loss={"importance_sampling": "token"},
        )  # fmt: skip
        plane = MemoryPlane()
        plane.register_partition("train", fields=FIELDS)
        meta, columns = tiny.batch(5, 96, rows=ROWS)
        plan = plan_batch(plane.put(meta, columns), config.batching, data_parallel=1).shards[0]
        (tmp_path / impl).mkdir()
        with worker(config, model, plane, tmp_path / impl) as policy:
            found[impl] = [policy.train(plan, objective) for objective in ("grpo", "grpo", "sft", "sft")]
    eager, graphs = (
        [{name: value for name, value in step.items() if not name.startswith(("cuda_graph/", "gpu_memory/"))} for step in steps]
        for steps in found.values()
    )
    assert graphs == eager
    captured = [step["cuda_graph/captures"] for step in found["full_iteration"]]
    assert sum(captured[:2]) == 1
    assert captured[2:] == [0, 0]
