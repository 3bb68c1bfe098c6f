"""The losses written out as formulas of whole columns, without weight columns: what the objectives must equal in every bit."""

from __future__ import annotations

import math
from typing import Literal

import torch

from configs.loss import LossConfig

Sums = dict[str, torch.Tensor]


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
    mask = token_mask.to(logprobs.dtype) * sample_mask[:, None]
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantage = advantages[:, None]
    free, bounded = ratio * advantage, clipped * advantage
    weights, kept, corrections = _correct(old, generation_logprobs, mask, config)
    per_token = -weights * torch.minimum(free, bounded)
    kl = torch.zeros_like(per_token)
    if reference_logprobs is not None:
        gap = torch.where(mask > 0, reference_logprobs - logprobs, 0.0)
        kl = weights * (torch.exp(gap) - gap - 1)
        per_token = per_token + config.kl_coef * kl
    loss = _aggregate(per_token, kept, config.aggregation, global_tokens, global_sequences)
    cut = (free > bounded).to(mask.dtype)
    sums = {"kl": masked_sum(kl, mask), "clipped": masked_sum(cut, mask), "ratio": masked_sum(ratio, mask)} | corrections
    return loss, sums, {"ratio": (ratio.detach() * mask).max()}


def importance_weights(
    policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, how: Literal["token", "sequence"], cap: float
) -> tuple[torch.Tensor, Sums]:
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


def sequence_mask(policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, largest: float) -> torch.Tensor:
    error = torch.where(mask > 0, (policy_logprobs.detach() - generation_logprobs).abs(), 0.0)
    mean = error.sum(dim=1) / (mask > 0).sum(dim=1).clamp(min=1)
    return (mean <= largest).to(mask.dtype)


def sft_loss(
    logprobs: torch.Tensor, token_mask: torch.Tensor, sample_mask: torch.Tensor, *, global_tokens: int | torch.Tensor
) -> tuple[torch.Tensor, Sums]:
    mask = token_mask.to(logprobs.dtype) * sample_mask[:, None]
    return (-logprobs * mask).sum() / global_tokens, {}


def logprob_error(logprobs: torch.Tensor, generation_logprobs: torch.Tensor, token_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    error = torch.where(token_mask, (logprobs.detach() - generation_logprobs).abs(), 0.0)
    return error.sum(), error.max()


def _correct(
    policy_logprobs: torch.Tensor, generation_logprobs: torch.Tensor | None, mask: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor, Sums]:
    if config.importance_sampling == "none" and config.max_sequence_logprob_error is None:
        return torch.ones_like(mask), mask, {}
    assert generation_logprobs is not None
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
    return (values.detach() * mask).sum()
