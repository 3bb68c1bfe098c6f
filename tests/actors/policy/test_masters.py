"""Where the float32 masters of a bfloat16 policy begin: at the numbers of the checkpoint, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.policy.conftest import LAYOUTS
from tests.actors.policy.test_parity import stored

pytestmark = pytest.mark.slow


def masters(rank: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in rank["state"].items() if name.startswith("fp32_param.")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_are_the_numbers_of_the_file(results: Any, models: dict[str, Path], layout: str) -> None:
    """float32 weights are (test_parity), in the same places; passes and engines get them rounded, as before."""
    found, exact = results(layout)["masters-bfloat16"], results(layout)["masters-float32"]
    for mine, theirs in zip(found, exact, strict=True):
        assert masters(mine).keys() == masters(theirs).keys() != set()
        for name, master in masters(theirs).items():
            assert torch.equal(masters(mine)[name], master), name
            assert layout == "DP2" or not torch.equal(master, master.bfloat16().float()), name
    for name, tensor in stored(models["qwen3-tied"]).items():
        assert torch.equal(found[0]["weights"][name], tensor.bfloat16()), name


def test_a_step_from_rounded_masters_is_another_one(results: Any) -> None:
    fine, coarse = results("TP1")["masters-step"][0], results("TP1")["masters-rounded-step"][0]
    assert fine["metrics"][0]["loss"] == coarse["metrics"][0]["loss"]  # the same working copy
    assert any(not torch.equal(tensor, coarse["weights"][name]) for name, tensor in fine["weights"].items())


def test_a_fresh_optimizer_keeps_the_masters(results: Any) -> None:
    """Of the warm start's, GRPO goes on with what it has learned, not with its rounding."""
    trained, reset = results("TP1")["masters-trained"][0], results("TP1")["masters-reset"][0]
    assert any(name.startswith("exp_avg.") for name in trained["state"])
    assert not any(name.startswith("exp_avg.") for name in reset["state"])
    for name, master in masters(trained).items():
        assert torch.equal(masters(reset)[name], master), name
