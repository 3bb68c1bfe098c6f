"""float16 with its loss scale, and bfloat16 rounded by chance: training, and going on from a saved state, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.policy.conftest import LAYOUTS
from tests.actors.policy.program import Job, run_layout

pytestmark = pytest.mark.slow
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 3}
FLOAT16 = {"dtype": "float16", "optimizer": OPTIMIZER}
HIGH = FLOAT16 | {"loss_scale": {"initial": 2.0**24, "growth_steps": 3}}
CHANCE = {"dtype": "bfloat16", "rounding": "stochastic", "optimizer": OPTIMIZER}
STEPS = ("sft",) * 4
SAVED = ("sft", "sft", "sft", "working", "begin_save", "finish_save", "sft", "sft", "export", "state")
RESUMED = ("load", "working", "sft", "sft", "export", "state")


@pytest.fixture(scope="module")
def one(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, model = tmp_path_factory.mktemp("precision"), {"model": str(models["llama-untied"])}
    jobs = [
        Job("exact", actions=("logprob", *STEPS), policy={"optimizer": OPTIMIZER}, **model),
        Job("float16", actions=("logprob", *STEPS), policy=FLOAT16, **model),
        Job("overflow", actions=("sft",) * 16, policy=HIGH, **model),
        Job("overflow-warmed", actions=("warm_up", *["sft"] * 16), policy=HIGH, **model),
        Job("lowest", actions=("sft",), policy=FLOAT16 | {"loss_scale": {"initial": 2.0**24, "minimum": 2.0**24}}, **model),
    ]
    for name, policy in (("float16", HIGH), ("chance", CHANCE)):
        directory = {"directory": str(root / name)}
        jobs.append(Job(f"{name}-saved", actions=SAVED, policy=policy, **directory, **model))
        jobs.append(Job(f"{name}-resumed", actions=RESUMED, policy=policy, **directory, **model))
    jobs.append(Job("chance-loaded", actions=("load", "working", "state"), policy=CHANCE, directory=str(root / "chance"), **model))
    return {name: ranks[0] for name, ranks in run_layout(LAYOUTS["TP1"], jobs).items()}


@pytest.fixture(scope="module")
def two(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = {"model": str(models["llama-untied"])}
    split: dict[str, Any] = {"directory": str(tmp_path_factory.mktemp("precision") / "split"), "distributed": True, "policy": CHANCE}
    jobs = [
        Job(f"{name}{'-split' if parted else ''}", actions=(*STEPS, "working", "export"), policy=policy, distributed=parted, **model)
        for name, policy in (("chance", CHANCE), ("float16", HIGH))
        for parted in (False, True)
    ]
    jobs += [Job("saved", actions=SAVED, **split, **model), Job("resumed", actions=RESUMED, **split, **model)]
    return run_layout(LAYOUTS["DP2"], jobs)


def test_float16_is_nearer_to_float32_than_bfloat16_can_be(one: Any) -> None:
    for key, row in one["exact"]["policy_logprobs"].items():
        torch.testing.assert_close(one["float16"]["policy_logprobs"][key], row, atol=3e-2, rtol=0)
    for found, exact in zip(one["float16"]["metrics"], one["exact"]["metrics"], strict=True):
        assert found["loss"] == pytest.approx(exact["loss"], rel=5e-3)
        assert found["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2)  # of gradients, not of scaled ones
        assert (found["lr"], found["loss_scale"], found["skipped_steps"]) == (exact["lr"], 65536.0, 0.0)


def test_an_overflow_lowers_the_scale_and_makes_no_step(one: Any) -> None:
    steps = one["overflow"]["metrics"]
    skipped = [bool(step["skipped_steps"]) for step in steps]
    assert skipped[0]
    assert not all(skipped)
    first = skipped.index(False)
    assert [step["loss_scale"] for step in steps[: first + 1]] == [2.0 ** (24 - i) for i in range(first + 1)]
    assert len({step["loss"] for step in steps[: first + 1]}) == 1  # the same weights
    assert all(("grad_norm" in step) != bool(step["skipped_steps"]) for step in steps)
    assert steps[first]["lr"] == pytest.approx(OPTIMIZER["lr"] / 3)  # the first step of the schedule
    assert steps[first + 1]["loss"] < steps[first]["loss"]
    assert steps[first + 3]["loss_scale"] == 2 * steps[first]["loss_scale"]  # it grows again


def test_warming_up_moves_no_loss_scale(one: Any) -> None:
    assert one["overflow-warmed"]["metrics"] == one["overflow"]["metrics"]


def test_an_overflow_at_the_lowest_scale_is_an_error(one: Any) -> None:
    assert "FloatingPointError" in one["lowest"]["error"]


@pytest.mark.parametrize("name", ["float16", "chance"])
def test_a_saved_policy_goes_on_to_the_bit(one: Any, name: str) -> None:
    saved, resumed = one[f"{name}-saved"], one[f"{name}-resumed"]
    assert resumed["metrics"] == saved["metrics"][3:]
    for kind in ("working", "state", "weights"):
        for key, tensor in saved[kind].items():
            assert torch.equal(resumed[kind][key], tensor), (kind, key)


def test_chance_gives_one_of_the_two_neighbours_of_a_master(one: Any) -> None:
    """The working copy after three updates, beside the masters that a resumed run loaded it from."""
    loaded = one["chance-loaded"]
    masters = {name.removeprefix("fp32_param."): value for name, value in loaded["state"].items() if name.startswith("fp32_param.")}
    assert masters.keys() == loaded["working"].keys()
    away = 0
    for name, working in loaded["working"].items():
        assert ((working.float().flatten() - masters[name]).abs() <= masters[name].abs() / 128).all(), name
        away += int((working.flatten() != masters[name].bfloat16()).sum())
    assert away > 0.1 * sum(master.numel() for master in masters.values())


@pytest.mark.parametrize("name", ["chance", "chance-split", "float16", "float16-split"])
def test_replicas_hold_the_same_weights(two: Any, name: str) -> None:
    first, second = two[name]
    assert first["metrics"] == second["metrics"]
    for key, tensor in first["working"].items():
        assert torch.equal(second["working"][key], tensor), key


def test_an_optimizer_in_parts_rounds_by_the_same_chances(two: Any) -> None:
    """Masters differ in their last bits, which rarely decides."""
    for key, tensor in two["chance"][0]["working"].items():
        other = two["chance-split"][0]["working"][key]
        assert (tensor != other).float().mean() < 0.01, key


def test_an_optimizer_in_parts_goes_on_to_the_bit(two: Any) -> None:
    for saved, resumed in zip(two["saved"], two["resumed"], strict=True):
        assert resumed["metrics"] == saved["metrics"][3:]
        for kind in ("working", "state"):
            for key, tensor in saved[kind].items():
                assert torch.equal(resumed[kind][key], tensor), (kind, key)
