"""The KL penalty's gradient against that of the KL itself, by enumeration; the entropy bonus against autograd through the full softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.policy.logprob import VocabShard, vocab_logprobs
from actors.policy.objectives.components import kl_term
from actors.policy.objectives.grpo import Grpo
from configs.loss import LossConfig
from configs.policy import PolicyConfig
from tests.actors.policy.objectives.batches import micro_batch
from tests.actors.policy.objectives.test_components import LENGTH, ROWS, batch_of, draw, draw_off_policy, loss_of, ours

ESTIMATORS = ("k1", "k2", "k3")
V, PADDED = 7, 9


def expected_gradients(how: str, estimator: Any, *, on_policy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the penalty, in the mean over all tokens that the old policy may sample; and of KL(policy || reference). By logits."""
    generator = torch.Generator().manual_seed(3)
    logits, reference, old = torch.randn(3, V, generator=generator, dtype=torch.float64).unbind()
    logits = logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), reference.log_softmax(-1)
    old = policy.detach() if on_policy else old.log_softmax(-1)
    config = LossConfig(kl_coef=1, kl_estimator=estimator, kl_gradient=how)
    terms = kl_term(reference - policy, (policy.detach() - old).exp(), config)
    (found,) = torch.autograd.grad((old.exp() * terms).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    return found, wanted


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_corrected_gradient_is_that_of_the_kl(estimator: str, on_policy: bool) -> None:
    torch.testing.assert_close(*expected_gradients("corrected", estimator, on_policy=on_policy))


def test_plain_gradients_are_those_that_the_papers_warn_of() -> None:
    """k2 on its own samples has the KL's (arXiv 2510.01555); k3 has that of KL(reference || policy), and off policy none has."""
    torch.testing.assert_close(*expected_gradients("plain", "k2", on_policy=True))
    for estimator, on_policy in (("k3", True), ("k3", False), ("k2", False)):
        found, wanted = expected_gradients("plain", estimator, on_policy=on_policy)
        assert (found - wanted).norm() > 0.1 * wanted.norm()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("sampling", ["none", "token"])
def test_the_corrected_penalty_token_by_token(estimator: Any, sampling: Any) -> None:
    """Value ratio · k; for k3 also the gradient of that product (DeepSeek-V3.2), which is ratio · log(policy / reference) ∇ log policy."""
    config = LossConfig(kl_coef=0.3, kl_estimator=estimator, kl_gradient="corrected", importance_sampling=sampling)
    data = draw_off_policy(30)
    data["advantages"] = torch.zeros(ROWS)
    loss, sums = ours(data, config)
    expected, slope = torch.zeros(()), torch.zeros(ROWS, LENGTH)
    for row in range(ROWS):
        for t in range(LENGTH):
            if not data["token_mask"][row, t] or not data["sample_mask"][row]:
                continue
            policy, old = data["logprobs"][row, t], data["old_logprobs"][row, t]
            ratio, gap = torch.exp(policy - old), data["reference_logprobs"][row, t] - policy
            k = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - gap - 1}[estimator]
            weight = min(float((old - data["generation_logprobs"][row, t]).exp()), 2.0) if sampling == "token" else 1.0
            expected = expected + weight * ratio * k
            slope[row, t] = weight * float(ratio.detach()) * -float(gap.detach())
    tokens = data["token_mask"].sum()
    torch.testing.assert_close(loss, 0.3 * expected / tokens)
    torch.testing.assert_close(sums["kl"], expected.detach())
    (gradient,) = torch.autograd.grad(loss, data["logprobs"])
    torch.testing.assert_close(gradient, 0.3 * slope / tokens)
    if estimator == "k3":
        torch.testing.assert_close(gradient, torch.autograd.grad(0.3 * expected / tokens, data["logprobs"])[0])


def through_the_vocabulary(logits: torch.Tensor, data: dict[str, Any], config: LossConfig, rows: slice = slice(None)) -> Any:
    """The objective over log-probabilities and entropies of these logits [ROWS, LENGTH, PADDED], of which V are tokens."""
    shard = VocabShard(0, PADDED, V)
    logprobs, entropies = vocab_logprobs(logits[rows], data["targets"][rows], shard, entropy_gradient=config.reads_entropy)
    objective, b = Grpo(PolicyConfig(loss=config)), batch_of(data, rows)
    columns = {name: b.columns[name] for name in objective.columns}
    b = micro_batch(data["token_mask"][rows], data["sample_mask"][rows], columns, tokens=int(data["token_mask"].sum()), sequences=ROWS)
    return objective.loss(b.with_columns(objective.weights(b)), logprobs, entropies)


def draw_logits(seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    data = draw(seed) | {"old_logprobs": None}
    logits = (2 * torch.randn(ROWS, LENGTH, PADDED)).requires_grad_()
    return logits, data | {"targets": torch.randint(0, V, (ROWS, LENGTH))}


@pytest.mark.parametrize("how", [{}, {"aggregation": "sequence_mean"}, {"aggregation": "fixed_length", "aggregation_length": 13}])
def test_the_entropy_bonus_equals_autograd_through_the_full_softmax(how: dict[str, Any]) -> None:
    logits, data = draw_logits(31)
    loss, report = through_the_vocabulary(logits, data, LossConfig(entropy_coef=0.2, **how))
    expected, total = torch.zeros(()), torch.zeros(())
    for row in range(ROWS):
        counted = [t for t in range(LENGTH) if data["token_mask"][row, t] and data["sample_mask"][row]]
        values = []
        for t in counted:
            p = logits[row, t, :V].softmax(-1)
            entropy = -(p * p.log()).sum()
            chosen = p[data["targets"][row, t]]
            surrogate = chosen / chosen.detach() * data["advantages"][row]
            values.append(-surrogate - 0.2 * entropy)
            total = total + entropy.detach()
        if not values:
            continue
        scale = {"sequence_mean": ROWS * len(counted), "fixed_length": ROWS * 13}.get(
            how.get("aggregation", ""), int(data["token_mask"].sum())
        )
        expected = expected + torch.stack(values).sum() / scale
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(report["entropy"], total)
    found, wanted = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert not found[..., V:].any()  # padding of the vocabulary


def test_micro_batches_order_and_padding_change_no_bonus() -> None:
    logits, data = draw_logits(32)
    config = LossConfig(entropy_coef=0.2, kl_coef=0.1, kl_gradient="corrected")
    whole, _ = through_the_vocabulary(logits, data, config)
    (first,) = torch.autograd.grad(whole, logits)
    parts = sum(through_the_vocabulary(logits, data, config, rows)[0] for rows in (slice(0, 2), slice(2, 3), slice(3, ROWS)))
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(parts, logits)[0], first, atol=1e-6, rtol=1e-6)
    order = torch.randperm(ROWS)
    moved = {key: value.detach()[order] if value is not None else None for key, value in data.items()}
    there = logits.detach()[order].requires_grad_()
    found, _ = through_the_vocabulary(there, moved, config)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, there)[0], first[order], atol=1e-6, rtol=1e-6)
    wild = torch.where(data["token_mask"][..., None], logits.detach(), 1e4 * torch.randn(PADDED)).requires_grad_()
    padded, _ = through_the_vocabulary(wild, data, config)
    assert torch.equal(padded, whole)
    assert torch.equal(torch.autograd.grad(padded, wild)[0], first)


def test_a_response_that_is_left_out_has_no_bonus() -> None:
    data = draw_off_policy(33)
    data["advantages"] = torch.zeros(ROWS)
    config = LossConfig(entropy_coef=1.0, max_sequence_logprob_error=0.6)
    objective = Grpo(PolicyConfig(loss=config, recompute_logprobs="always"))
    entropies = torch.ones(ROWS, LENGTH, requires_grad=True)
    b = batch_of(data)
    loss, report = objective.loss(b.with_columns(objective.weights(b)), data["logprobs"], entropies)
    (gradient,) = torch.autograd.grad(loss, entropies)
    stays = gradient.any(dim=1)
    assert int(data["sample_mask"].sum()) - int(stays.sum()) == report["masked_sequences"] > 0
    assert torch.equal(gradient != 0, data["token_mask"] & stays[:, None])


def test_the_bonus_follows_its_target() -> None:
    """Skywork-OR1: up by a step while the entropy is below the target, down and off above; as a checkpoint has it."""
    config = LossConfig(target_entropy=0.5, entropy_coef_step=0.1, entropy_coef=0.1)
    objective, data = Grpo(PolicyConfig(loss=config)), draw(35) | {"old_logprobs": None}
    totals = dict.fromkeys(objective.reported, 1.0)
    expected, active = 0.1, []
    for entropy in (0.4, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.4):
        weight = objective.weights(batch_of(data))["entropy"]
        active.append(float(weight.max()))
        assert objective.metrics(totals)["entropy_coef"] == pytest.approx(active[-1])
        assert torch.equal(weight, torch.full_like(weight, active[-1]) * batch_of(data).counted)
        objective.entropy_control.see({"entropy": entropy})
        expected = max(0.0, expected + (0.1 if entropy < 0.5 else -0.1))
        again = Grpo(PolicyConfig(loss=config))
        again.entropy_control.restore(objective.entropy_control.state())
        assert again.entropy_control.state() == objective.entropy_control.state()
        assert float(again.weights(batch_of(data))["entropy"].max()) == pytest.approx(0.0 if entropy > 0.5 else expected)
    assert active == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0])
    assert Grpo(PolicyConfig()).entropy_control.state() == {}


def test_without_a_bonus_entropies_have_no_gradient() -> None:
    logits, data = draw_logits(34)
    plain, _ = through_the_vocabulary(logits, data, LossConfig())
    with_columns = loss_of(Grpo(PolicyConfig()), batch_of(data), vocab_logprobs(logits, data["targets"], VocabShard(0, PADDED, V))[0])[0]
    assert torch.equal(plain, with_columns)
    assert torch.equal(*(torch.autograd.grad(value, logits)[0] for value in (plain, with_columns)))
