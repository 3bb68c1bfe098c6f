"""CISPO: clipped importance weights on log-probabilities (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""

from __future__ import annotations

import torch

from configs.loss import LossConfig


def cispo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, loss: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π, r = π / π_old; sg: without a gradient.

    Every token keeps a gradient: the bound is on its weight. The paper has no lower bound (clip_low: 1).
    """
    counted = mask > 0
    ratio = torch.exp(torch.where(counted, logprobs - old, 0.0)).detach()
    weight = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return weight * advantages * torch.where(counted, logprobs, 0.0), (weight != ratio).to(mask.dtype)
