"""The objectives against a token-by-token reference, and how they split."""

from typing import Any

import pytest
import torch

from actors.policy.loss import grpo_loss, logprob_error, sft_loss
from configs.policy import LossConfig
from tests.actors.policy import reference

ROWS, LENGTH = 7, 11


def draw(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    mask = torch.rand(ROWS, LENGTH) < 0.6
    mask[:, -1] = True  # every row has a token
    return {
        "logprobs": (-torch.rand(ROWS, LENGTH)).requires_grad_(),
        "old_logprobs": -torch.rand(ROWS, LENGTH),
        "advantages": torch.randn(ROWS),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1]),
        "reference_logprobs": -torch.rand(ROWS, LENGTH),
    }


def ours(data: dict[str, Any], config: LossConfig, rows: slice = slice(None)) -> Any:
    part = {name: None if value is None else value[rows] for name, value in data.items()}
    return grpo_loss(**part, config=config, global_tokens=int(data["token_mask"].sum()), global_sequences=ROWS)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_equals_the_reference_with_its_gradient(kl_coef: float, aggregation: Any) -> None:
    config = LossConfig(clip_low=0.1, clip_high=0.3, kl_coef=kl_coef, aggregation=aggregation)
    data = draw()
    loss, _, _ = ours(data, config)
    (gradient,) = torch.autograd.grad(loss, data["logprobs"])
    expected = reference.grpo(
        data["logprobs"], data["old_logprobs"], data["reference_logprobs"] if kl_coef else None, data,
        low=0.1, high=0.3, kl_coef=kl_coef, aggregation=aggregation,
    )  # fmt: skip
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, data["logprobs"])[0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_splitting_the_batch_changes_nothing(aggregation: Any) -> None:
    config = LossConfig(kl_coef=0.2, aggregation=aggregation)
    data = draw(1)
    whole, sums, largest = ours(data, config)
    (gradient,) = torch.autograd.grad(whole, data["logprobs"])
    parts = [ours(data, config, rows) for rows in (slice(0, 1), slice(1, 5), slice(5, ROWS))]
    total = sum(part[0] for part in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, data["logprobs"])[0], gradient)
    for name, value in sums.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)
    assert max(part[2]["ratio"] for part in parts) == largest["ratio"]


def test_metrics_are_sums_over_counted_tokens() -> None:
    data = draw(2)
    config = LossConfig(clip_low=0.05, clip_high=0.1)
    _, sums, largest = ours(data, config)
    counted = (data["token_mask"] * data["sample_mask"][:, None]).bool()
    ratio = (data["logprobs"] - data["old_logprobs"]).exp()
    gap = data["reference_logprobs"] - data["logprobs"]
    binding = torch.where(data["advantages"][:, None] > 0, ratio > 1.1, ratio < 0.95)
    torch.testing.assert_close(sums["ratio"], ratio[counted].sum().detach())
    torch.testing.assert_close(sums["kl"], (gap.exp() - gap - 1)[counted].sum().detach())
    assert sums["clipped"] == (binding & counted).sum()
    assert largest["ratio"] == ratio[counted].max()


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_policy_gradient() -> None:
    data = draw(3) | {"old_logprobs": None, "reference_logprobs": None}
    loss, sums, _ = ours(data, LossConfig())
    counted = data["token_mask"] * data["sample_mask"][:, None]
    (gradient,) = torch.autograd.grad(loss, data["logprobs"])
    torch.testing.assert_close(gradient, -data["advantages"][:, None] * counted / data["token_mask"].sum())
    assert sums["ratio"] == counted.sum()
    assert sums["clipped"] == 0


def test_what_stands_at_masked_positions_does_not_matter() -> None:
    data, wild = draw(4), draw(4)
    for name in ("old_logprobs", "reference_logprobs"):
        wild[name] = torch.where(wild["token_mask"], wild[name], -1e4)
    config = LossConfig(kl_coef=0.2)
    loss, other = ours(data, config)[0], ours(wild, config)[0]
    assert torch.equal(loss, other)
    assert torch.isfinite(torch.autograd.grad(other, wild["logprobs"])[0]).all()


def test_kl_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference_logprobs are needed"):
        ours(draw() | {"reference_logprobs": None}, LossConfig(kl_coef=0.1))


def test_sft_loss() -> None:
    data = draw(5)
    loss, _ = sft_loss(data["logprobs"], data["token_mask"], data["sample_mask"], global_tokens=int(data["token_mask"].sum()))
    torch.testing.assert_close(loss, reference.sft(list(data["logprobs"]), data))


def test_logprob_error() -> None:
    logprobs, generation = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[-9.0, -1.5, -2.25]])
    total, largest = logprob_error(logprobs, generation, torch.tensor([[False, True, True]]))
    assert (total, largest) == (0.75, 0.5)
