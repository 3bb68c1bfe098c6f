"""Correction for the generating engine: its probabilities differ from the policy's, by other kernels and by older weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from configs.loss import LossConfig

CORRECTION_SUMS = ("importance/count", "importance/weight", "importance/weight_squared", "importance/truncated", "masked_sequences")


def correct(
    policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The corrections that `config` asks for: importance weights, and sequences that are left out.

    Args:
        policy_logprobs, generation_logprobs: [B, T], of the recomputed policy and of the engine. mask: [B, T], 1 on counted tokens.

    Returns:
        Importance weights [B, T], all 1 without sampling weights; the mask without the sequences that are left out; `CORRECTION_SUMS`.
    """
    kept, sums = mask, {}
    if config.max_sequence_logprob_error is not None:
        kept = mask * sequence_mask(policy_logprobs, generation_logprobs, mask, config.max_sequence_logprob_error)[:, None]
        sums["masked_sequences"] = ((mask > 0).any(dim=1) & ~(kept > 0).any(dim=1)).sum().to(mask.dtype)
    if config.importance_sampling == "none":
        return torch.ones_like(mask), kept, sums
    weights, weighed = importance_weights(policy_logprobs, generation_logprobs, kept, config)
    return weights, kept, sums | weighed


def importance_weights(
    policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """policy / generation probability of each token, or of each whole response, within bounds. No gradient flows through it.

    truncate    min(ratio, importance_cap): bounds the variance and only lowers weights (truncated importance sampling: Ionides 2008;
                for the mismatch of training and generation engines: Yao et al., "Your efficient RL framework secretly brings you
                off-policy RL training", 2025)
    mask        the ratio, and 0 outside [importance_floor, importance_cap] (token: IcePop, Ling team, arXiv 2510.18855; sequence: masked
                importance sampling, Liu et al., "When speed kills stability", 2025)

    A response's ratio is the product over its tokens, the unbiased one (`sequence`), or their geometric mean (`geometric`), which does not
    shrink with its length. What is left out still counts in the denominators of the loss.

    Returns:
        [B, T], 0 where the mask is. Sums over counted tokens, or over rows that have one: importance/count, /weight, /weight_squared
        and /truncated (ratios outside the bounds). The effective sample size is weight² / weight_squared, at most count.
    """
    gap = torch.where(mask > 0, policy_logprobs.detach() - generation_logprobs, 0.0)
    units = mask > 0
    if config.importance_sampling != "token":
        gap, lengths, units = gap.sum(dim=1, keepdim=True), units.sum(dim=1, keepdim=True), units.any(dim=1, keepdim=True)
        gap = gap / lengths.clamp(min=1) if config.importance_sampling == "geometric" else gap
    beyond = gap > math.log(config.importance_cap)
    if config.importance_beyond == "mask":
        beyond = beyond | (gap < math.log(config.importance_floor) if config.importance_floor else False)
        weights = torch.where(beyond, 0.0, torch.exp(gap))
    else:
        weights = torch.exp(gap).clamp(max=config.importance_cap)
    counted = units.to(mask.dtype)
    sums = {
        "importance/count": counted.sum(),
        "importance/weight": (weights * counted).sum(),
        "importance/weight_squared": (weights**2 * counted).sum(),
        "importance/truncated": (beyond * counted).sum(),
    }
    return weights * (mask > 0), sums


def sequence_mask(policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, largest: float) -> torch.Tensor:
    """[B], 0 for rows whose mean |policy - generation log-probability| over counted tokens is above `largest`, else 1.

    The mean and not the maximum: a long response has some improbable token nearly always, and would be left out for its length.
    """
    error = torch.where(mask > 0, (policy_logprobs.detach() - generation_logprobs).abs(), 0.0)
    mean = error.sum(dim=1) / (mask > 0).sum(dim=1).clamp(min=1)
    return (mean <= largest).to(mask.dtype)


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
