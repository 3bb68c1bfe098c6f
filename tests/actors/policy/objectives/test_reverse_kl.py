"""The reverse KL over a teacher's candidates, against its formula in double precision, from logits on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.policy.logprob import VocabShard, vocab_logprobs
from actors.policy.objectives.components import EXACT_KL
from actors.policy.objectives.grpo import Grpo
from actors.policy.objectives.reverse_kl import reverse_kl
from configs.policy import PolicyConfig
from tests.actors.policy.objectives.batches import micro_batch

V, ROWS, LENGTH = 11, 4, 6
SHARD = VocabShard(0, V, V)


def drawn(seed: int, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of student and teacher: [ROWS, LENGTH, V]."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (spread * torch.randn(2, ROWS, LENGTH, V, generator=generator)).unbind()
    return student.requires_grad_(), teacher


def candidates(teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = teacher.log_softmax(-1).topk(k)
    return found.indices, found.values


def expected(student: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    """[...]: the k tokens one by one, then everything else as a single outcome."""
    p, q = student.double().softmax(-1), teacher.double().softmax(-1)
    order = q.argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    total = sum(p[..., i] * (p[..., i] / q[..., i]).log() for i in range(k))
    if k < p.shape[-1]:
        total = total + p[..., k:].sum(-1) * (p[..., k:].sum(-1) / q[..., k:].sum(-1)).log()
    return torch.as_tensor(total)


def ours(student: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    ids, logprobs = candidates(teacher, k)
    return reverse_kl(vocab_logprobs(student, ids, SHARD)[0], logprobs)


@pytest.mark.parametrize("k", [1, 3, V - 4, V])
@pytest.mark.parametrize("spread", [0.1, 2.0, 4.0])
def test_value_and_gradient_are_those_of_the_formula(k: int, spread: float) -> None:
    student, teacher = drawn(k, spread)
    found, wanted = ours(student, teacher, k), expected(student, teacher, k)
    # The teacher's rest is 1 less a sum of float32 probabilities: its logarithm is as exact as that, the smaller it is the less.
    rest = 1 - candidates(teacher.double(), k)[1].exp().sum(-1) if k < V else torch.ones(ROWS, LENGTH)
    exact = rest > 1e-5
    assert exact.any()
    bound = (3e-6 + 5e-7 / rest)[exact]
    assert ((found - wanted)[exact].abs() < bound + 3e-6 * wanted[exact]).all()
    mine, theirs = (torch.autograd.grad(one.sum(), student)[0][exact] for one in (found, wanted))
    assert ((mine - theirs).abs() < bound.unsqueeze(-1) + 1e-5 * theirs.abs()).all()


def test_more_candidates_come_closer_to_the_kl_of_the_whole_vocabulary_from_below() -> None:
    student, teacher = drawn(0, spread=0.5)
    by_k = torch.stack([ours(student, teacher, k) for k in range(1, V + 1)]).detach()
    whole = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=one.detach()) for one in (student, teacher)))
    torch.testing.assert_close(by_k[-1], whole, atol=2e-6, rtol=1e-5)
    assert (by_k.diff(dim=0) > -2e-6).all()
    assert (by_k > -1e-6).all()


def test_a_student_like_its_teacher_and_one_that_shares_no_token_have_numbers() -> None:
    _, teacher = drawn(1)
    assert ours(teacher, teacher, 3).abs().max() < 1e-6
    apart = torch.where(torch.arange(V) < 5, 60.0, -60.0).expand(ROWS, LENGTH, V)
    student = (-apart).requires_grad_()
    found = ours(student, apart, 5)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()


def policy(loss: dict[str, Any], **more: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"teacher": {"path": "teacher", "top_k": 3}, "loss": loss} | more)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("parts", [[range(ROWS)], [(2, 0), (3, 1)], [(0,), (1,), (3,), (2,)]])
def test_the_loss_is_its_weighted_mean_however_rows_are_dealt(aggregation: str, parts: list[Any]) -> None:
    """Beside a policy gradient; responses of different lengths, one of them left out."""
    config = policy({"kl_coef": 0.7, "policy_gradient_coef": 0.5, "aggregation": aggregation})
    objective, (student, teacher) = Grpo(config), drawn(5)
    assert objective.columns == ("advantages", "generation_logprobs", "teacher_ids", "teacher_logprobs")
    lengths, counted = torch.tensor([6, 2, 4, 3]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    mask, targets = torch.arange(LENGTH) < lengths[:, None], torch.randint(0, V, (ROWS, LENGTH))
    advantages = torch.randn(ROWS)[:, None].expand(ROWS, LENGTH)
    total, sums = torch.zeros(()), {"kl": 0.0, "kl_tokens": 0.0}
    for rows in (list(part) for part in parts):
        width = int(lengths[rows].max())  # padded less in a micro-batch of shorter rows
        logits = student[rows, :width]
        logprobs = vocab_logprobs(logits, targets[rows, :width], SHARD)[0]
        exact = reverse_kl(vocab_logprobs(logits, (chosen := candidates(teacher[rows, :width], 3))[0], SHARD)[0], chosen[1])
        columns = {"advantages": advantages[rows, :width], "generation_logprobs": logprobs.detach()}
        b = micro_batch(mask[rows, :width], counted[rows], columns, tokens=int(mask.sum()), sequences=ROWS)
        b = b.with_columns(objective.weights(b) | {EXACT_KL: exact})
        loss, report = objective.loss(b, logprobs, torch.zeros_like(logprobs))
        total = total + loss
        sums = {name: value + float(report[name]) for name, value in sums.items()}
    kl, log_p = expected(student, teacher, 3), student.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    per_token = (0.7 * kl - 0.5 * advantages * (log_p - log_p.detach()).exp()) * mask * counted[:, None]
    means = per_token.sum() / mask.sum() if aggregation == "token_mean" else (per_token.sum(1) / lengths).sum() / ROWS
    torch.testing.assert_close(total.double(), means, atol=1e-6, rtol=1e-6)
    (mine,), (theirs,) = (torch.autograd.grad(one, student) for one in (total, means))
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    weighed = mask * counted[:, None] > 0
    assert sums["kl"] / sums["kl_tokens"] == pytest.approx(float(kl[weighed].mean()), rel=1e-5)


def test_the_correction_for_the_engine_does_not_weigh_it() -> None:
    config = policy({"kl_coef": 1, "policy_gradient_coef": 0, "importance_sampling": "token", "importance_cap": 3})
    objective, exact = Grpo(config), torch.rand(2, 3)
    columns = {"advantages": torch.zeros(2, 3), "generation_logprobs": torch.full((2, 3), -2.0)}
    b = micro_batch(torch.ones(2, 3, dtype=torch.bool), torch.ones(2), columns, tokens=6, sequences=2)
    b = b.with_columns(objective.weights(b) | {EXACT_KL: exact})
    loss, _ = objective.loss(b, torch.full((2, 3), -1.0), torch.zeros(2, 3))
    torch.testing.assert_close(loss, exact.mean())


@pytest.mark.parametrize(
    ("loss", "more", "said"),
    [
        ({"kl_coef": 1, "kl_estimator": "k2"}, {}, "loss.kl_estimator has no effect with teacher.top_k"),
        ({"kl_coef": 1, "kl_in": "reward", "kl_estimator": "k1"}, {}, "loss.kl_in is reward"),
        ({"objective": "dpo"}, {}, "teacher.top_k has no effect with loss.objective dpo"),
        ({"kl_coef": 1}, {"parallel": {"context": 2}, "dtype": "bfloat16"}, "teacher.top_k does not work with parallel.context"),
        ({"kl_coef": 1}, {"teacher": {"path": "teacher", "top_k": 0}}, "top_k"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(loss: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policy(loss, **more)
