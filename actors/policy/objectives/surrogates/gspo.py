"""GSPO: the ratio of a whole response in place of its tokens' (Zheng et al., arXiv 2507.18071, eq. 5 and 7)."""

from __future__ import annotations

import torch

from configs.loss import LossConfig


def gspo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, loss: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the response's tokens of log π / π_old).

    The paper's objective is the mean over responses: `aggregation: sequence_mean`. Its bounds are 3e-4 and 4e-4: a mean over tokens moves
    little.
    """
    gap = torch.where(mask > 0, logprobs - old, 0.0)
    ratio = torch.exp(gap.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1))
    free, bounded = ratio * advantages, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages
    return torch.minimum(free, bounded), (free > bounded).to(mask.dtype)
