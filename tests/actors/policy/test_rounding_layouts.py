"""Stochastic rounding over ranks: weights that several of them hold are rounded alike, others independently, and all without a bias."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.actors.policy.program import ROUNDINGS

pytestmark = pytest.mark.slow
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"  # of the first stage, and its copy on the last one
TENSOR_PARALLEL = ["TP2", "TP2xPP2"]


def masters(rank: dict[str, Any]) -> dict[str, torch.Tensor]:
    prefix = "fp32_param."
    return {name.removeprefix(prefix): value for name, value in rank["state"].items() if name.startswith(prefix)}


def steps(master: torch.Tensor) -> torch.Tensor:
    """The distance of the bfloat16 neighbours of each weight: 8 bits of significand."""
    return torch.ldexp(torch.ones_like(master, dtype=torch.float64), torch.frexp(master).exponent - 8)


def errors(rank: dict[str, Any], name: str) -> torch.Tensor:
    """Working copy less master, in steps."""
    master = masters(rank)[name]
    return (rank["working"][name].flatten().double() - master.double()) / steps(master)


def check_alike(first: dict[str, Any], name: str, second: dict[str, Any], other: str) -> None:
    assert torch.equal(masters(first)[name], masters(second)[other]), name
    assert torch.equal(first["working"][name], second["working"][other]), name


@pytest.mark.parametrize("layout", TENSOR_PARALLEL)
def test_norms_are_rounded_alike_on_tensor_parallel_ranks(results: Any, layout: str) -> None:
    ranks = results(layout)["chance"]
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        norms = [name for name in first["working"] if "layernorm" in name]
        assert {"input", "q", "k", "pre_mlp"} <= {name.split(".")[-2].removesuffix("_layernorm") for name in norms}
        for name in norms:
            check_alike(first, name, second, name)
        assert (torch.cat([errors(first, name) for name in norms]).abs() > 0.5).float().mean() > 0.1  # by chance, not to nearest


@pytest.mark.parametrize("layout", ["PP2", "TP2xPP2"])
def test_tied_embeddings_are_rounded_alike_on_two_stages(results: Any, layout: str) -> None:
    ranks = results(layout)["chance"]
    half = len(ranks) // 2
    for first, last in zip(ranks[:half], ranks[half:], strict=True):
        check_alike(first, EMBEDDING, last, HEAD)
        assert (errors(first, EMBEDDING).abs() > 0.5).float().mean() > 0.1


def test_data_parallel_replicas_are_rounded_alike(results: Any) -> None:
    """With an optimizer in parts: each replica rounds its own, and gets the rest from the other."""
    first, second = results("DP2")["chance"]
    assert first["metrics"] == second["metrics"]
    for name, working in first["working"].items():
        assert torch.equal(second["working"][name], working), name


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_the_mean_of_the_working_copies_is_the_master(results: Any, layout: str) -> None:
    for rank in results(layout)["chance"]:
        for name, master in masters(rank).items():
            away = (rank["rounded"][name].flatten() - master.double()).abs()
            assert (away <= 5.5 * 0.5 * steps(master) / math.sqrt(ROUNDINGS)).all(), name


@pytest.mark.parametrize("layout", TENSOR_PARALLEL)
def test_parts_of_a_matrix_have_chances_of_their_own(results: Any, layout: str) -> None:
    """Otherwise the errors of two ranks' parts would be correlated by about 0.5."""
    ranks = results(layout)["chance"]
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        split = [name for name, value in first["working"].items() if value.dim() == 2]
        both = torch.stack([torch.cat([errors(rank, name) for name in split]) for rank in (first, second)])
        assert both.shape[1] > 5_000
        assert torch.corrcoef(both)[0, 1].abs() < 5 / math.sqrt(both.shape[1])
