"""The objectives, as pure functions of tensors. Every result is a sum over the given rows, divided by denominators of the WHOLE
batch: adding over micro-batches and data-parallel ranks gives the whole batch's value, however it was cut. A row is one response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

from configs.policy import LossConfig

Sums = dict[str, torch.Tensor]

# The sums that the correction for the generating engine reports beside the others.
CORRECTION_SUMS = ("importance/count", "importance/weight", "importance/weight_squared", "importance/truncated", "masked_sequences")


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    token_mask: torch.Tensor,
    sample_mask: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    config: LossConfig,
    *,
    global_tokens: int | torch.Tensor,
    global_sequences: int | torch.Tensor,
    generation_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums, Sums]:
    """The clipped surrogate with a KL penalty, negated (DeepSeekMath, arXiv 2402.03300, eq. 3; clip-higher of DAPO, 2503.14476).

    With `config.importance_sampling` the surrogate is weighted by `importance_weights`: the decoupled PPO objective
    (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298), where the ratio is clipped against the recomputed policy (the proximal
    one) and the weight is that policy's over the generating engine's (the behaviour one). The KL term is weighted alike (as in
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1): of a token that the policy has made improbable since it was sampled, k3 and its gradient
    have no bound, their product with the weight has.

    Args:
        logprobs: [B, T] float32, log-probability of each token under the policy being trained; carries the gradient.
        old_logprobs: [B, T] under the policy that the ratio compares with. None: the same policy, so the ratio is 1.
        advantages: [B]. sample_mask: [B], 0 leaves a row out. token_mask: [B, T], 1 on response tokens.
        reference_logprobs: [B, T]; needed when `config.kl_coef` > 0.
        global_tokens, global_sequences: response tokens and rows of the whole batch, as numbers or scalar tensors; masked sequences stay in
            them.
        generation_logprobs: [B, T] of the engine; needed when `config` corrects for it.

    Returns:
        The loss; sums over tokens: kl (k3 estimate against the reference, with the loss's weights), clipped, ratio; and maxima: ratio. When
        `config` corrects for the engine also the sums of `importance_weights`, and masked_sequences.

    Raises:
        ValueError: log-probabilities that `config` needs are missing.
    """
    if config.kl_coef > 0 and reference_logprobs is None:
        raise ValueError("policy.loss.kl_coef is above 0: reference_logprobs are needed")
    mask = token_mask.to(logprobs.dtype) * sample_mask[:, None]
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    # Masked positions hold no log-probabilities of anything: keep exp() away from them.
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantage = advantages[:, None]
    free, bounded = ratio * advantage, clipped * advantage
    weights, kept, corrections = _correct(old, generation_logprobs, mask, config)
    per_token = -weights * torch.minimum(free, bounded)
    kl = torch.zeros_like(per_token)
    if reference_logprobs is not None:
        gap = torch.where(mask > 0, reference_logprobs - logprobs, 0.0)
        kl = weights * (torch.exp(gap) - gap - 1)  # k3: unbiased, never negative (Schulman, "Approximating KL divergence", 2020)
        per_token = per_token + config.kl_coef * kl
    loss = _aggregate(per_token, kept, config.aggregation, global_tokens, global_sequences)
    cut = (free > bounded).to(mask.dtype)
    sums = {"kl": masked_sum(kl, mask), "clipped": masked_sum(cut, mask), "ratio": masked_sum(ratio, mask)} | corrections
    return loss, sums, {"ratio": (ratio.detach() * mask).max()}


def importance_weights(
    policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, how: Literal["token", "sequence"], cap: float
) -> tuple[torch.Tensor, Sums]:
    """min(policy / generation probability, cap) of each token, or of each whole response. No gradient flows through it.

    Truncation bounds the variance and only lowers weights (truncated importance sampling: Ionides 2008; for the mismatch of training and
    generation engines: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). A response's ratio is
    the product over its tokens, the unbiased one (sequence-level TIS: Liu et al., "When Speed Kills Stability", 2025), not GSPO's
    geometric mean (arXiv 2507.18071).

    Args:
        policy_logprobs, generation_logprobs: [B, T], of the recomputed policy and of the engine. mask: [B, T], 1 on counted tokens.

    Returns:
        [B, T], 0 where the mask is. Sums over counted tokens, or over rows that have one: importance/count, /weight, /weight_squared
        and /truncated (weights cut at the cap). The effective sample size is weight² / weight_squared, at most count.
    """
    gap = torch.where(mask > 0, policy_logprobs.detach() - generation_logprobs, 0.0)
    units = mask > 0
    if how == "sequence":
        gap, units = gap.sum(dim=1, keepdim=True), units.any(dim=1, keepdim=True)
    weights = torch.exp(gap).clamp(max=cap)
    counted = units.to(mask.dtype)
    sums = {
        "importance/count": counted.sum(),
        "importance/weight": masked_sum(weights, counted),
        "importance/weight_squared": masked_sum(weights**2, counted),
        "importance/truncated": masked_sum((gap > math.log(cap)).to(mask.dtype), counted),
    }
    return weights * (mask > 0), sums


def correction_metrics(totals: Mapping[str, float], config: LossConfig) -> dict[str, float]:
    """From the whole batch's `CORRECTION_SUMS` to what a step reports; nothing when `config` corrects nothing.

    Returns:
        importance/weight (mean), importance/truncated_fraction, importance/effective_sample_fraction in [0, 1] (Kish: weight² /
        (weight_squared x count); 1 when all weights are equal), and masked_sequences, a count.
    """
    found = {}
    if config.importance_sampling != "none":
        count, weight, squared = (max(totals[f"importance/{name}"], 1e-12) for name in ("count", "weight", "weight_squared"))
        found = {
            "importance/weight": weight / count,
            "importance/truncated_fraction": totals["importance/truncated"] / count,
            "importance/effective_sample_fraction": weight**2 / (squared * count),
        }
    if config.max_sequence_logprob_error is not None:
        found["masked_sequences"] = totals["masked_sequences"]
    return found


def sequence_mask(policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, largest: float) -> torch.Tensor:
    """[B], 0 for rows whose mean |policy - generation log-probability| over counted tokens is above `largest`, else 1.

    The mean and not the maximum: a long response has some improbable token nearly always, and would be left out for its length.
    """
    error = torch.where(mask > 0, (policy_logprobs.detach() - generation_logprobs).abs(), 0.0)
    mean = error.sum(dim=1) / (mask > 0).sum(dim=1).clamp(min=1)
    return (mean <= largest).to(mask.dtype)


def sft_loss(
    logprobs: torch.Tensor, token_mask: torch.Tensor, sample_mask: torch.Tensor, *, global_tokens: int | torch.Tensor
) -> tuple[torch.Tensor, Sums]:
    """Mean negative log-likelihood of the response tokens. Shapes as in `grpo_loss`."""
    mask = token_mask.to(logprobs.dtype) * sample_mask[:, None]
    return (-logprobs * mask).sum() / global_tokens, {}


def logprob_error(logprobs: torch.Tensor, generation_logprobs: torch.Tensor, token_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and maximum of |policy - generation log-probability| over response tokens: how far the two engines disagree."""
    error = torch.where(token_mask, (logprobs.detach() - generation_logprobs).abs(), 0.0)
    return error.sum(), error.max()


def _correct(
    policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor | None, mask: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor, Sums]:
    """Weights [B, T], the mask [B, T] without the sequences that are left out, and the sums of both: ones and all when not corrected."""
    if not config.corrects_generation:
        return torch.ones_like(mask), mask, {}
    if generation_logprobs is None:
        raise ValueError("policy.loss corrects for the generating engine: generation_logprobs are needed")
    kept = mask
    sums: Sums = {}
    if config.max_sequence_logprob_error is not None:
        kept = mask * sequence_mask(policy_logprobs, generation_logprobs, mask, config.max_sequence_logprob_error)[:, None]
        sums["masked_sequences"] = ((mask > 0).any(dim=1) & ~(kept > 0).any(dim=1)).sum().to(mask.dtype)
    if config.importance_sampling == "none":
        return torch.ones_like(mask), kept, sums
    weights, weighed = importance_weights(policy_logprobs, generation_logprobs, kept, config.importance_sampling, config.importance_cap)
    return weights, kept, sums | weighed


def _aggregate(
    per_token: torch.Tensor, mask: torch.Tensor, how: str, tokens: int | torch.Tensor, sequences: int | torch.Tensor
) -> torch.Tensor:
    if how == "token_mean":
        return (per_token * mask).sum() / tokens
    lengths = mask.sum(dim=1).clamp(min=1)
    return ((per_token * mask).sum(dim=1) / lengths).sum() / sequences


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` where `mask` is 1, without a gradient."""
    return (values.detach() * mask).sum()
