"""The objectives, as pure functions of tensors. Every result is a sum over the given rows, divided by denominators of the WHOLE
batch: adding over micro-batches and data-parallel ranks gives the whole batch's value, however it was cut.
"""

from __future__ import annotations

import torch

from configs.policy import LossConfig

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
    global_tokens: int,
    global_sequences: int,
) -> tuple[torch.Tensor, Sums, Sums]:
    """The clipped surrogate with a KL penalty, negated (DeepSeekMath, arXiv 2402.03300, eq. 3; clip-higher of DAPO, 2503.14476).

    Args:
        logprobs: [B, T] float32, log-probability of each token under the policy being trained; carries the gradient.
        old_logprobs: [B, T] under the policy that the ratio compares with. None: the same policy, so the ratio is 1.
        advantages: [B]. sample_mask: [B], 0 leaves a row out. token_mask: [B, T], 1 on response tokens.
        reference_logprobs: [B, T]; needed when `config.kl_coef` > 0.
        global_tokens, global_sequences: response tokens and rows of the whole batch.

    Returns:
        The loss; sums over tokens: kl (k3 estimate against the reference), clipped, ratio; and maxima: ratio.

    Raises:
        ValueError: `config.kl_coef` > 0 without reference log-probabilities.
    """
    if config.kl_coef > 0 and reference_logprobs is None:
        raise ValueError("policy.loss.kl_coef is above 0: reference_logprobs are needed")
    mask = token_mask.to(logprobs.dtype) * sample_mask[:, None]
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    # Masked positions hold no log-probabilities of anything: keep exp() away from them.
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantage = advantages[:, None]
    per_token = -torch.minimum(ratio * advantage, clipped * advantage)
    kl = torch.zeros_like(per_token)
    if reference_logprobs is not None:
        gap = torch.where(mask > 0, reference_logprobs - logprobs, 0.0)
        kl = torch.exp(gap) - gap - 1  # k3: unbiased and never negative (Schulman, "Approximating KL divergence", 2020)
        per_token = per_token + config.kl_coef * kl
    loss = _aggregate(per_token, mask, config.aggregation, global_tokens, global_sequences)
    cut = (ratio * advantage > clipped * advantage).to(mask.dtype)
    sums = {"kl": masked_sum(kl, mask), "clipped": masked_sum(cut, mask), "ratio": masked_sum(ratio, mask)}
    return loss, sums, {"ratio": (ratio.detach() * mask).max()}


def sft_loss(
    logprobs: torch.Tensor, token_mask: torch.Tensor, sample_mask: torch.Tensor, *, global_tokens: int
) -> tuple[torch.Tensor, Sums]:
    """Mean negative log-likelihood of the response tokens. Shapes as in `grpo_loss`."""
    mask = token_mask.to(logprobs.dtype) * sample_mask[:, None]
    return (-logprobs * mask).sum() / global_tokens, {}


def logprob_error(logprobs: torch.Tensor, generation_logprobs: torch.Tensor, token_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and maximum of |policy - generation log-probability| over response tokens: how far the two engines disagree."""
    error = torch.where(token_mask, (logprobs.detach() - generation_logprobs).abs(), 0.0)
    return error.sum(), error.max()


def _aggregate(per_token: torch.Tensor, mask: torch.Tensor, how: str, tokens: int, sequences: int) -> torch.Tensor:
    if how == "token_mean":
        return (per_token * mask).sum() / tokens
    lengths = mask.sum(dim=1).clamp(min=1)
    return ((per_token * mask).sum(dim=1) / lengths).sum() / sequences


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of `values` where `mask` is 1, without a gradient."""
    return (values.detach() * mask).sum()
