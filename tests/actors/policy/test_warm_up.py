"""warm_up(): the synthetic batch has the columns and the worst shape of a real one, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import plan_batch
from actors.policy.batch import BASE, CANDIDATES
from actors.policy.executors import Request
from actors.policy.objectives.grpo import Grpo
from actors.policy.warm_up import PARTITION, warm_up
from configs.base import ConfigError
from configs.policy import PolicyConfig

LONGEST = 48


def run_with(**policy: Any) -> tuple[list[tuple[Request, KVBatchMeta]], MemoryPlane, dict[str, float]]:
    """The stages that were run, over a plane of their own."""
    config, plane, seen = PolicyConfig(**policy), MemoryPlane(), []

    def run(request: Request, meta: KVBatchMeta) -> None:
        columns = plane.get(meta, (*BASE, *Grpo(config).columns))
        assert all(len(row) == meta.sequence_lengths[0] for name in ("input_ids", "token_mask") for row in columns[name])
        seen.append((request, meta))

    seconds = warm_up(config, plane, LONGEST, run)
    return seen, plane, seconds


def test_every_stage_runs_once_over_the_longest_samples_and_the_rows_are_gone() -> None:
    seen, plane, seconds = run_with(
        batching={"micro_batch_size": 4}, parallel={"data": 2}, recompute_logprobs="always", loss={"kl_coef": 0.1}
    )
    assert [request.method for request, _ in seen] == ["logprob", "warm_up"]
    assert list(seconds) == ["logprob", "train"]
    assert all(meta.sequence_lengths == (LONGEST,) * 8 for _, meta in seen)
    assert plane.samples(PARTITION) == 0


def test_an_unneeded_logprob_stage_is_not_warmed_up() -> None:
    seen, _, _ = run_with()
    assert [request.method for request, _ in seen] == ["warm_up"]


def test_with_cuda_graphs_the_stages_run_until_they_are_captured() -> None:
    seen, _, _ = run_with(batching={"token_buckets": [64]}, cuda_graph={"impl": "full_iteration", "warmup_steps": 2})
    assert [request.method for request, _ in seen] == ["warm_up"] * 3


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_a_token_budget_is_filled(mode: str) -> None:
    seen, _, _ = run_with(batching={"mode": mode, "tokens_per_micro_batch": 200})
    (_, meta), config = seen[0], PolicyConfig(batching={"mode": mode, "tokens_per_micro_batch": 200})
    (shard,) = plan_batch(meta, config.batching, data_parallel=1).shards
    assert [micro.shape[0] * micro.shape[1] for micro in shard.micro_batches] == [200 // LONGEST * LONGEST]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_seq_len": 49}, r"warmup_seq_len: 49 tokens .* \(48\)"),
        ({"warmup_global_batch_size": 3}, "warmup_global_batch_size: 3 samples do not divide by policy.parallel.data = 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_with(compiled_graph=options, parallel={"data": 2})


def test_every_teacher_passes_first_and_leaves_what_training_reads() -> None:
    teacher = {"path": "one", "sources": {"words": "two"}, "top_k": 3}
    config, plane, seen = PolicyConfig.model_validate({"teacher": teacher, "loss": {"kl_coef": 1}}), MemoryPlane(), []

    def run(request: Request, meta: KVBatchMeta) -> None:
        seen.append((request.method, {tag["source"] for tag in meta.tags if "source" in tag}))
        if request.method == "logprob" and request.arguments[1]:
            plane.put(meta, {name: [torch.zeros(length, 3) for length in meta.sequence_lengths] for name in CANDIDATES}, overwrite=True)
        else:
            plane.get(meta, (*BASE, *Grpo(config).columns))

    seconds = warm_up(config, plane, LONGEST, run)
    assert seen == [("logprob", {""}), ("logprob", {"words"}), ("logprob", set()), ("warm_up", set())]
    assert list(seconds) == ["ref_logprob", "ref_logprob words", "logprob", "train"]
    assert plane.samples(PARTITION) == 0
