"""Each surrogate against its paper's formula, token by token, in value and gradient; and what must not change a loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from actors.policy.objectives import surrogates
from actors.policy.objectives.components import kl_estimate
from configs.base import ConfigError
from configs.loader import load
from configs.loss import LossConfig
from tests.actors.policy.objectives.test_components import LENGTH, ROWS, draw, ours
from tests.conftest import ROOT

Row = Sequence[tuple[torch.Tensor, float]]  # of each counted token: log π, which carries the gradient, and log π_old


def ratios(row: Row) -> list[torch.Tensor]:
    return [torch.exp(log - old) for log, old in row]


def clip(row: Row, a: float, c: LossConfig) -> list[torch.Tensor]:
    found = []
    for ratio in ratios(row):
        inside = 1 - c.clip_low <= float(ratio) <= 1 + c.clip_high
        bounded = ratio if inside else torch.tensor(min(max(float(ratio), 1 - c.clip_low), 1 + c.clip_high))
        value = ratio * a if float(ratio) * a <= float(bounded) * a else bounded * a
        if c.dual_clip is not None and a < 0 and float(value) < c.dual_clip * a:
            value = torch.tensor(c.dual_clip * a)
        found.append(value)
    return found


def gspo(row: Row, a: float, c: LossConfig) -> list[torch.Tensor]:
    s = torch.stack(ratios(row)).prod() ** (1 / len(row))
    bounded = min(max(float(s), 1 - c.clip_low), 1 + c.clip_high)
    return [s * a if float(s) * a <= bounded * a else torch.tensor(bounded * a)] * len(row)


def cispo(row: Row, a: float, c: LossConfig) -> list[torch.Tensor]:
    return [min(max(float(ratio), 1 - c.clip_low), 1 + c.clip_high) * a * log for ratio, (log, _) in zip(ratios(row), row, strict=True)]


def sapo(row: Row, a: float, c: LossConfig) -> list[torch.Tensor]:
    tau = c.sapo_tau_positive if a > 0 else c.sapo_tau_negative
    return [4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * a for ratio in ratios(row)]


FORMULAS: dict[str, Callable[[Row, float, LossConfig], list[torch.Tensor]]] = {"clip": clip, "gspo": gspo, "cispo": cispo, "sapo": sapo}
CONFIGS = {
    "clip": LossConfig(),
    "clip-higher": LossConfig(clip_low=0.1, clip_high=0.4),
    "dual-clip": LossConfig(dual_clip=1.3),
    "gspo": LossConfig(surrogate="gspo", clip_low=0.03, clip_high=0.04),
    "cispo": LossConfig(surrogate="cispo", clip_low=1.0, clip_high=0.3),
    "sapo": LossConfig(surrogate="sapo", sapo_tau_positive=1.0, sapo_tau_negative=1.7),
}
AGGREGATIONS: list[dict[str, Any]] = [
    {"aggregation": "token_mean"}, {"aggregation": "sequence_mean"}, {"aggregation": "fixed_length", "aggregation_length": 13},
]  # fmt: skip
each_config = pytest.mark.parametrize("name", CONFIGS)
each_aggregation = pytest.mark.parametrize("how", AGGREGATIONS, ids=lambda how: how["aggregation"])


def configured(name: str, how: dict[str, Any]) -> LossConfig:
    return LossConfig.model_validate(CONFIGS[name].model_dump(exclude_unset=True) | how)


def off_policy(seed: int) -> dict[str, Any]:
    """Ratios from about 0.4 to 2.7, no reference."""
    data = draw(seed) | {"reference_logprobs": None}
    data["old_logprobs"] = data["logprobs"].detach() + 0.5 * torch.randn(ROWS, LENGTH).clamp(-2, 2)
    return data


def by_formula(data: dict[str, Any], config: LossConfig) -> torch.Tensor:
    total = torch.zeros(())
    for row in range(ROWS):
        if data["sample_mask"][row] == 0:
            continue
        counted = [(data["logprobs"][row, t], float(data["old_logprobs"][row, t])) for t in range(LENGTH) if data["token_mask"][row, t]]
        values = FORMULAS[config.surrogate](counted, float(data["advantages"][row]), config)
        part = -torch.stack(values).sum()
        if config.aggregation == "token_mean":
            total = total + part / int(data["token_mask"].sum())
        else:
            total = total + part / (ROWS * (len(counted) if config.aggregation == "sequence_mean" else 13))
    return total


def gradient(loss: torch.Tensor, data: dict[str, Any]) -> torch.Tensor:
    return torch.autograd.grad(loss, data["logprobs"])[0]


@each_config
@each_aggregation
def test_equals_the_formula_in_value_and_gradient(name: str, how: dict[str, Any]) -> None:
    config, data = configured(name, how), off_policy(20)
    (loss, sums), expected = ours(data, config), by_formula(data, config)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, data), gradient(expected, data))
    assert (sums["clipped"] > 0) == (name != "sapo")


@each_config
@each_aggregation
def test_order_padding_and_micro_batches_change_nothing(name: str, how: dict[str, Any]) -> None:
    config, data = configured(name, how), off_policy(21)
    whole, _ = ours(data, config)
    first = gradient(whole, data)

    parts = sum(ours(data, config, rows)[0] for rows in (slice(0, 2), slice(2, 3), slice(3, ROWS)))
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient(parts, data), first, atol=1e-6, rtol=1e-6)

    order = torch.randperm(ROWS)
    other = {key: value.detach()[order] if value is not None else None for key, value in data.items()}
    other["logprobs"].requires_grad_()
    moved, _ = ours(other, config)
    torch.testing.assert_close(moved, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient(moved, other), first[order], atol=1e-6, rtol=1e-6)

    wild = {key: value.detach().clone() if value is not None else None for key, value in data.items()}
    for column in ("logprobs", "old_logprobs", "generation_logprobs"):
        wild[column] = torch.where(data["token_mask"], wild[column], -1e4)
    wild["logprobs"].requires_grad_()
    padded, _ = ours(wild, config)
    assert torch.equal(padded, whole)
    assert torch.equal(gradient(padded, wild), first)


@each_config
def test_on_the_policy_itself_each_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 all have the gradient of A log π, whose value only cispo has."""
    data = off_policy(22) | {"old_logprobs": None}
    counted = data["token_mask"] * data["sample_mask"][:, None]
    expected = -data["advantages"][:, None] * counted / data["token_mask"].sum()
    if name == "gspo":  # the mean over a response's tokens, of each of them
        expected = torch.where(counted > 0, expected, 0.0)
    torch.testing.assert_close(gradient(ours(data, CONFIGS[name])[0], data), expected)


def test_kl_estimates() -> None:
    gap = torch.tensor([-0.5, 0.0, 0.7], requires_grad=True)
    torch.testing.assert_close(kl_estimate(gap, "k2"), torch.tensor([0.125, 0.0, 0.245]))
    torch.testing.assert_close(kl_estimate(gap, "k3"), torch.tensor([math.exp(-0.5) - 0.5, 0.0, math.exp(0.7) - 1.7]))
    config, data = LossConfig(kl_coef=0.3, kl_estimator="k2"), draw(23)
    data["advantages"] = torch.zeros(ROWS)
    loss, sums = ours(data, config)
    counted = data["token_mask"] * data["sample_mask"][:, None]
    expected = 0.3 * ((data["reference_logprobs"] - data["logprobs"]) ** 2 / 2 * counted).sum() / data["token_mask"].sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums["kl"] * 0.3 / data["token_mask"].sum(), expected.detach())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"surrogate": "gspo", "dual_clip": 3}, "dual_clip has no effect with surrogate gspo: leave it out, or set surrogate to clip"),
        ({"surrogate": "sapo", "clip_high": 0.3}, "clip_high has no effect with surrogate sapo"),
        ({"sapo_tau_positive": 2}, "sapo_tau_positive has no effect with surrogate clip"),
        ({"kl_estimator": "k2"}, "kl_estimator has no effect with kl_coef 0"),
        (
            {"advantages": "max_likelihood", "normalize_advantages": "batch"},
            "normalize_advantages has no effect with advantages max_likelihood",
        ),
        ({"aggregation_length": 9}, "aggregation_length has no effect with aggregation token_mean"),
        ({"importance_cap": 3}, "importance_cap has no effect with importance_sampling none"),
        ({"importance_sampling": "token", "importance_floor": 0.5}, "importance_floor has no effect with importance_beyond truncate"),
        ({"surrogate": "gpso"}, "did you mean 'gspo'"),
        ({"dual_clip": 1}, "greater than 1"),
        ({"kl_estimator": "k1", "kl_coef": 1}, "k1 has a gradient of mean 0 in a loss: set kl_gradient to corrected"),
        ({"kl_gradient": "corrected"}, "kl_gradient has no effect with kl_coef 0"),
        ({"kl_in": "reward"}, "kl_in has no effect with kl_coef 0"),
        ({"kl_in": "reward", "kl_coef": 1, "kl_gradient": "corrected"}, "kl_gradient has no effect with kl_in reward"),
        ({"kl_in": "reward", "kl_coef": 1, "advantages": "max_likelihood"}, "max_likelihood wants rewards of 0 and above"),
        ({"kl_in": "reward", "kl_coef": 1, "policy_gradient_coef": 0, "entropy_coef": 1}, "kl_in reward acts through the advantages"),
        ({"advantages": "reinforce"}, "advantages reinforce knows no groups"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LossConfig(**options)


def test_settings_that_do_not_fit_the_run_are_refused_or_filled_in() -> None:
    with pytest.raises(ConfigError, match=r"a response's weight falls with its length towards 0: set rollout\.top_p=1"):
        load("arithmetic-cpu", ["rollout.top_p=0.9", "policy.loss.importance_sampling=sequence"])
    config = load("arithmetic-cpu", ["policy.loss.aggregation=fixed_length", "rollout.max_new_tokens=9"])
    assert config.policy.loss.aggregation_length == 9
    assert load("arithmetic-cpu", ["policy.loss={aggregation: fixed_length, aggregation_length: 5}"]).policy.loss.aggregation_length == 5


def test_the_settings_of_the_docs_are_settings() -> None:
    blocks = re.findall(r"`(\{[^`]*\})`", (ROOT / "docs/algorithms.md").read_text())
    assert len(blocks) > 12
    for block in blocks:
        load("arithmetic-cpu", [f"policy.loss={block}"])


def test_a_surrogate_of_ones_own() -> None:
    own = "tests.actors.policy.objectives.own:unclipped"
    data = off_policy(24)
    wide = LossConfig(clip_low=0.999999, clip_high=1e6)
    torch.testing.assert_close(ours(data, LossConfig(surrogate=own))[0], ours(data, wide)[0])
    with pytest.raises(
        ConfigError, match=r"policy.loss.surrogate: .* cannot be called as function\(logprobs, old, advantages, mask, loss\)"
    ):
        surrogates.find("tests.actors.policy.objectives.own:above_the_worst")
