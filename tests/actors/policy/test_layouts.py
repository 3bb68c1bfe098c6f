"""Padded, dynamic and packed micro-batches, and who reads the columns: none of it changes what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.policy import tiny
from tests.actors.policy.conftest import BATCHING
from tests.actors.policy.plans import plain_plan
from tests.actors.policy.test_parity import stored

LAYOUTS = ("TP1", "DP2", "TP2", "PP2")


def test_the_dynamic_job_has_micro_batches_of_several_shapes() -> None:
    meta, _ = tiny.batch(5, 97)
    for shard in plain_plan(meta, "dynamic", data_parallel=2):
        assert len({part.shape for part in shard.micro_batches}) == len(shard.micro_batches) == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_of_the_micro_batches_changes_nothing(results: Any, layout: str, mode: str) -> None:
    padded, other = results(layout)["grpo"], results(layout)[f"grpo-{mode}"]
    for column in ("policy_logprobs", "reference_logprobs"):
        assert padded[0][column].keys() == other[0][column].keys()
        for key, row in padded[0][column].items():
            assert row.any()
            torch.testing.assert_close(other[0][column][key], row, atol=1e-5, rtol=0)
    for step, expected in enumerate(padded[0]["metrics"]):
        for rank in other:
            assert rank["metrics"][step] == other[0]["metrics"][step]  # the same numbers on every rank
        metrics = other[0]["metrics"][step]
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (step, name)
    for name, tensor in padded[0]["weights"].items():
        torch.testing.assert_close(other[0]["weights"][name], tensor, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_columns_from_the_leader_give_the_same_bits(results: Any, layout: str) -> None:
    broadcast, independent = results(layout)["grpo"], results(layout)["independent"]
    for mine, own in zip(broadcast, independent, strict=True):
        assert mine["metrics"] == own["metrics"]
    for key, row in independent[0]["policy_logprobs"].items():
        assert torch.equal(broadcast[0]["policy_logprobs"][key], row)
    for name, tensor in independent[0]["weights"].items():
        assert torch.equal(broadcast[0]["weights"][name], tensor), name


@pytest.mark.slow
def test_columns_that_the_leader_cannot_read_stop_every_rank(results: Any, models: dict[str, Path]) -> None:
    leader, follower = results("TP2")["unreadable"]
    assert "UnknownKeyError" in leader["error"]
    assert "LeaderFetchError" in follower["error"]
    assert "worker 0, which reads for worker 1, failed: UnknownKeyError: partition 'train': no key 'k0'" in follower["error"]
    for name, tensor in stored(models["llama-untied"]).items():
        assert torch.equal(leader["weights"][name], tensor)  # and the workers still answer


@pytest.mark.slow
def test_a_retried_logprob_stage_writes_the_same_again(results: Any) -> None:
    again, once = results("TP1")["retried"][0], results("TP1")["llama-untied"][0]
    for key, row in once["policy_logprobs"].items():
        assert torch.equal(again["policy_logprobs"][key], row)
