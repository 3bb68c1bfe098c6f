"""The components of the loss, and their sum: weight x term per token, over a denominator of the whole batch.

    policy_gradient   -w · min(ratio · A, clip(ratio) · A)     ┐ also times the correction for the engine (importance.py)
    kl                 w · k3(policy, reference)               ┘
    cross_entropy     -w · log p

Every result is a sum over the given rows: adding over micro-batches and data-parallel ranks gives that of the whole batch.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.importance import CORRECTION_SUMS, correct
from configs.policy import LossConfig

Aggregation = Literal["token_mean", "sequence_mean"]
Report = dict[str, torch.Tensor]  # scalars: sums over tokens that count; maxima, which are named */max

REPORTED = ("loss", "tokens", "entropy", "kl", "clipped", "ratio", "ratio/max", "logprob_error", "logprob_error/max", *CORRECTION_SUMS)


def token_loss(
    b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, config: LossConfig, aggregation: Aggregation
) -> tuple[torch.Tensor, Report]:
    """The loss by the weight columns that the micro-batch has; and those of `REPORTED` that belong to them. See `Objective.loss`."""
    terms: list[torch.Tensor] = []
    report: Report = {}
    if "policy_gradient" in b.columns:
        terms, report = _clipped_surrogate(b, logprobs, config)
    if "cross_entropy" in b.columns:
        terms.append(-logprobs * b.columns["cross_entropy"])
    per_token, counted = functools.reduce(torch.add, terms), b.counted
    tokens, sequences = b.totals
    if aggregation == "token_mean":
        loss = per_token.sum() / tokens
    else:
        loss = (per_token.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).sum() / sequences
    return loss, report | {"loss": loss.detach(), "tokens": counted.sum(), "entropy": _masked_sum(entropies, counted)}


def _clipped_surrogate(b: MicroBatch, logprobs: torch.Tensor, config: LossConfig) -> tuple[list[torch.Tensor], Report]:
    """The clipped surrogate, negated, and the KL penalty (DeepSeekMath, arXiv 2402.03300, eq. 3; clip-higher of DAPO, 2503.14476).

    Reads advantages, generation_logprobs; policy_logprobs, without which the policy is the old one and the ratio 1; reference_logprobs
    if there is a weight column `kl`.

    With a correction for the engine this is the decoupled PPO objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298): the
    ratio is clipped against the recomputed policy (the proximal one), and weighted by that policy's probability over the generating
    engine's (the behaviour one). The KL term is weighted alike (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): on a token that the
    policy has made improbable since it was sampled, k3 and its gradient have no bound, their product with the weight has.
    """
    columns, weight = b.columns, b.columns["policy_gradient"]
    mask = (weight != 0).to(weight.dtype)
    old, generated, advantages = columns.get("policy_logprobs", logprobs.detach()), columns["generation_logprobs"], columns["advantages"]
    # Other positions hold no log-probabilities of anything: keep exp() away from them.
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    free, bounded = ratio * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    importance, kept, report = correct(old, generated, mask, config)
    terms = [-importance * torch.minimum(free, bounded) * (weight * kept)]
    if "kl" in columns:
        gap = torch.where(columns["kl"] != 0, columns["reference_logprobs"] - logprobs, 0.0)
        kl = importance * (torch.exp(gap) - gap - 1)  # k3: unbiased, never negative (Schulman, "Approximating KL divergence", 2020)
        terms.append(kl * (columns["kl"] * kept))
        report["kl"] = _masked_sum(kl, mask)
    # Of the weights that generated: after the first of several updates `logprobs` belongs to others.
    error = torch.where(mask > 0, (old - generated).abs(), 0.0)
    return terms, report | {
        "clipped": _masked_sum((free > bounded).to(mask.dtype), mask),
        "ratio": _masked_sum(ratio, mask),
        "ratio/max": (ratio.detach() * mask).max(),
        "logprob_error": error.sum(),
        "logprob_error/max": error.max(),
    }


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values.detach() * mask).sum()
