"""The components of the loss, and their sum: weight x term per token, over the denominator of the whole batch.

    policy_gradient   -w · min(ratio · A, clip(ratio) · A)        w: weight of the token, times the correction for the engine
    kl                 w · k3(policy, reference)                  (importance.py)
    cross_entropy     -w · log p

Every result is a sum over the given rows: adding over micro-batches and data-parallel ranks gives the whole batch's value, however it
was cut.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.importance import CORRECTION_SUMS, correct
from configs.policy import LossConfig

Sums = dict[str, torch.Tensor]
Aggregation = Literal["token_mean", "sequence_mean"]

SUMMED = ("loss", "tokens", "entropy", "kl", "clipped", "ratio", "logprob_error", *CORRECTION_SUMS)
LARGEST = ("ratio", "logprob_error")


def token_loss(
    b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, config: LossConfig, aggregation: Aggregation
) -> tuple[torch.Tensor, Sums, Sums]:
    """The components for which the micro-batch has weight columns.

    Args:
        logprobs: [B, T] float32, of each token under the policy; carries the gradient. entropies: [B, T] float32.

    Returns:
        The loss; sums over tokens that count (`SUMMED`, of the components that were computed), and maxima (`LARGEST`).
    """
    terms, sums, largest = [], {}, {}
    if "policy_gradient" in b.columns:
        terms, sums, largest = _clipped_surrogate(b, logprobs, config)
    if "cross_entropy" in b.columns:
        terms.append(-logprobs * b.columns["cross_entropy"])
    loss = _aggregate(functools.reduce(torch.add, terms), b, aggregation)
    counted = b.counted
    sums |= {"loss": loss.detach(), "tokens": counted.sum(), "entropy": _masked_sum(entropies, counted)}
    return loss, sums, largest


def _clipped_surrogate(b: MicroBatch, logprobs: torch.Tensor, config: LossConfig) -> tuple[list[torch.Tensor], Sums, Sums]:
    """The clipped surrogate, negated, and the KL penalty (DeepSeekMath, arXiv 2402.03300, eq. 3; clip-higher of DAPO, 2503.14476).

    With a correction for the engine this is the decoupled PPO objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298): the
    ratio is clipped against the recomputed policy (the proximal one), and weighted by that policy's probability over the generating
    engine's (the behaviour one). The KL term is weighted alike (as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1): of a token that the
    policy has made improbable since it was sampled, k3 and its gradient have no bound, their product with the weight has.

    Reads advantages, generation_logprobs; policy_logprobs (without it the policy is the old one: the ratio is 1); reference_logprobs
    where there is a weight column `kl`. Terms are 0 where their weight is.
    """
    columns, weight = b.columns, b.columns["policy_gradient"]
    mask = (weight != 0).to(weight.dtype)
    old, generated, advantages = columns.get("policy_logprobs", logprobs.detach()), columns["generation_logprobs"], columns["advantages"]
    # Other positions hold no log-probabilities of anything: keep exp() away from them.
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    free, bounded = ratio * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    importance, kept, sums = correct(old, generated, mask, config)
    terms = [-importance * torch.minimum(free, bounded) * (weight * kept)]
    if "kl" in columns:
        gap = torch.where(columns["kl"] != 0, columns["reference_logprobs"] - logprobs, 0.0)
        kl = importance * (torch.exp(gap) - gap - 1)  # k3: unbiased, never negative (Schulman, "Approximating KL divergence", 2020)
        terms.append(kl * (columns["kl"] * kept))
        sums["kl"] = _masked_sum(kl, mask)
    # Of the weights that generated: after the first of several updates `logprobs` belongs to others.
    error = torch.where(mask > 0, (old - generated).abs(), 0.0)
    clipped = (free > bounded).to(mask.dtype)
    sums |= {"clipped": _masked_sum(clipped, mask), "ratio": _masked_sum(ratio, mask), "logprob_error": error.sum()}
    return terms, sums, {"ratio": (ratio.detach() * mask).max(), "logprob_error": error.max()}


def _aggregate(per_token: torch.Tensor, b: MicroBatch, aggregation: Aggregation) -> torch.Tensor:
    tokens, sequences = b.totals
    if aggregation == "token_mean":
        return per_token.sum() / tokens
    return (per_token.sum(dim=1) / b.counted.sum(dim=1).clamp(min=1)).sum() / sequences


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values.detach() * mask).sum()
