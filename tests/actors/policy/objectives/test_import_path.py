"""Objectives and advantages by import path: what is refused, and one that is trained. (Advantages: tests/tasks/test_advantage.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.policy.objectives import advantages, registry
from configs.base import ConfigError
from configs.policy import PolicyConfig
from tests.actors.policy import tiny

OWN = "tests.actors.policy.objectives.own"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Grpo", "policy.loss.objective: cannot import 'no_such_module:Grpo'"),
        (f"{OWN}:FilteredImitatoin", "did you mean 'FilteredImitation'"),
        (f"{OWN}:above_the_worst", "does not derive from actors.policy.objectives.base:Objective"),
    ],
)
def test_what_is_no_objective_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        registry.build(name, PolicyConfig())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{OWN}:above_the_wurst", "policy.loss.advantages: .* did you mean 'above_the_worst'"),
        (f"{OWN}:of_one_reward", r"cannot be called as function\(rewards, normalize=...\)"),
        (f"{OWN}:annotations", r"cannot be called as function\(rewards, normalize=...\)"),
    ],
)
def test_what_is_no_advantage_function_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        advantages.find(name)


@pytest.mark.slow
def test_an_objective_of_ones_own_is_trained(results: Any) -> None:
    own, start = results("TP1")["own"][0], results("TP1")["llama-untied"][0]["policy_logprobs"]
    _, columns = tiny.batch(5, 96)
    tokens = sum(int(mask.sum()) for mask in columns["token_mask"])
    rows = zip(start.values(), *(columns[name] for name in ("token_mask", "sample_mask", "advantages")), strict=True)
    expected = sum(-(row * mask).sum() * weight * advantage.clamp(min=0) for row, mask, weight, advantage in rows) / tokens
    first, second = own["metrics"]
    assert first["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert second["loss"] < first["loss"]
    assert set(first) == {"loss", "entropy", "response_tokens", "grad_norm", "lr"}
    assert not torch.equal(own["weights"]["model.norm.weight"], results("TP1")["llama-untied"][0]["weights"]["model.norm.weight"])
