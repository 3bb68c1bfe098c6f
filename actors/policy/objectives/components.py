"""The components of the loss, and their sum: weight x term per token, over a denominator of the whole batch.

    policy_gradient   -w · surrogate (surrogates/)       ┐ also times the correction for the engine (importance.py)
    kl                 w · k(policy, reference)           ┘ (of an exact KL neither ratio nor correction: reverse_kl.py)
    entropy           -w · H(policy)
    cross_entropy     -w · log p

Every result is a sum over the given rows: adding over micro-batches and data-parallel ranks gives that of the whole batch.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives import surrogates
from actors.policy.objectives.importance import CORRECTION_SUMS, correct
from configs.loss import LossConfig

OF_ROLLOUTS = ("policy_gradient", "kl", "entropy")
EXACT_KL = "exact_kl"  # a column that carries the policy's gradient: each token's `reverse_kl`, where a teacher gave candidates
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
Report = dict[str, torch.Tensor]  # scalars: sums over tokens that count; maxima, which are named */max

REPORTED = (
    "loss",
    "tokens",
    "entropy",
    "kl",
    "kl_tokens",
    "clipped",
    "ratio",
    "ratio/max",
    "logprob_error",
    "logprob_error/max",
    *CORRECTION_SUMS,
)


def token_loss(
    b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, config: LossConfig, aggregation: Aggregation
) -> tuple[torch.Tensor, Report]:
    """The loss by the weight columns that the micro-batch has; and those of `REPORTED` that belong to them. See `Objective.loss`."""
    terms: list[torch.Tensor] = []
    report: Report = {}
    if not b.columns.keys().isdisjoint(OF_ROLLOUTS):
        terms, report = _of_rollouts(b, logprobs, entropies, config)
    if "cross_entropy" in b.columns:
        terms.append(-logprobs * b.columns["cross_entropy"])
    per_token, counted = functools.reduce(torch.add, terms), b.counted
    tokens, sequences = b.totals
    if aggregation == "token_mean":
        loss = per_token.sum() / tokens
    elif aggregation == "fixed_length":
        assert config.aggregation_length is not None  # configs/run.py sees to it
        loss = per_token.sum() / (sequences * config.aggregation_length)
    else:
        loss = (per_token.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).sum() / sequences
    return loss, report | {"loss": loss.detach(), "tokens": counted.sum(), "entropy": _masked_sum(entropies, counted)}


def _of_rollouts(b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, config: LossConfig) -> tuple[list[torch.Tensor], Report]:
    """The surrogate, negated, the KL penalty (DeepSeekMath, arXiv 2402.03300, eq. 3) and the entropy, negated.

    Reads advantages, generation_logprobs; policy_logprobs, without which the policy is the old one and the ratio 1; reference_logprobs
    if there is a weight column `kl`, or in its place `EXACT_KL`.

    With a correction for the engine this is the decoupled PPO objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298): the
    ratio is clipped against the recomputed policy (the proximal one), and weighted by that policy's probability over the generating
    engine's (the behaviour one). The KL term is weighted alike: on a token that the policy has made improbable since it was sampled, k3
    and its gradient have no bound, their product with the weight has. Entropy and exact KL are not weighted: they are no estimates from
    the sampled token.
    """
    columns = b.columns
    weights = {name: columns[name] for name in OF_ROLLOUTS if name in columns}
    mask = functools.reduce(torch.logical_or, (weight != 0 for weight in weights.values())).to(logprobs.dtype)
    old = columns.get("policy_logprobs", logprobs.detach())
    generated = columns.get("generation_logprobs", old)
    # Other positions hold no log-probabilities of anything: keep exp() away from them.
    ratio = torch.exp(torch.where(mask > 0, logprobs.detach() - old, 0.0))
    importance, kept, report = correct(old, generated, mask, config)
    terms: list[torch.Tensor] = []
    if "policy_gradient" in weights:
        value, clipped = surrogates.find(config.surrogate)(logprobs, old, columns["advantages"], mask, config)
        terms.append(-importance * value * (weights["policy_gradient"] * kept))
        report["clipped"] = _masked_sum(clipped, (weights["policy_gradient"] != 0).to(mask.dtype))
    if "kl" in weights:
        if EXACT_KL in columns:
            kl = torch.where(weights["kl"] != 0, columns[EXACT_KL], 0.0)
        else:
            gap = torch.where(weights["kl"] != 0, columns["reference_logprobs"] - logprobs, 0.0)
            kl = importance * kl_term(gap, ratio, config)
        terms.append(kl * (weights["kl"] * kept))
        report |= {"kl": _masked_sum(kl, mask), "kl_tokens": (weights["kl"] != 0).sum()}
    if "entropy" in weights:
        terms.append(-entropies * (weights["entropy"] * kept))
    # Of the weights that generated: after the first of several updates `logprobs` belongs to others.
    error = torch.where(mask > 0, (old - generated).abs(), 0.0)
    return terms, report | {
        "ratio": _masked_sum(ratio, mask),
        "ratio/max": (ratio * mask).max(),
        "logprob_error": error.sum(),
        "logprob_error/max": error.max(),
    }


def kl_term(gap: torch.Tensor, ratio: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """What is added to the loss for each token, on samples of the old policy.

    plain       k(gap): its gradient is not that of KL(policy || reference), but for k2 on samples of the policy itself (Tang and Munos,
                "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477; arXiv 2510.01555)
    corrected   r k(gap), with the gradient r (-gap) ∇ log π whatever the estimate: that of the token's KL, without bias on samples of
                the old policy. For k3 it is the gradient of r k3 through r as well (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)

    Args:
        gap: reference's less policy's log-probability, with the policy's gradient. ratio: r = π / π_old, without a gradient.
    """
    value = kl_estimate(gap, config.kl_estimator)
    if config.kl_gradient == "plain":
        return value
    fixed = gap.detach()
    return ratio * (value.detach() + fixed * (gap - fixed))  # the second is 0; gap's gradient is -∇ log π


def kl_estimate(gap: torch.Tensor, how: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Of KL(policy || reference), from one sample of the policy (Schulman, "Approximating KL divergence", 2020).

    k1 = -gap               unbiased; negative on some tokens
    k2 = gap² / 2           biased
    k3 = exp(gap) - gap - 1  unbiased and never negative

    Args:
        gap: reference's less policy's log-probability.
    """
    if how == "k1":
        return -gap
    return gap**2 / 2 if how == "k2" else torch.exp(gap) - gap - 1


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values.detach() * mask).sum()
