"""PPO's clipped surrogate (arXiv 1707.06347, eq. 7), as GRPO takes it (DeepSeekMath, arXiv 2402.03300, eq. 3).

clip-higher of DAPO (arXiv 2503.14476, eq. 10) is clip_high above clip_low. The second bound is dual-clip PPO's (Ye et al., arXiv
1912.09729, eq. 5): without it, a token of a bad response that has become much more probable has a gradient without bound.
"""

from __future__ import annotations

import torch

from configs.loss import LossConfig


def clip(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, loss: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = π / π_old; with dual_clip c at least c A where A < 0."""
    ratio = torch.exp(torch.where(mask > 0, logprobs - old, 0.0))
    free, bounded = ratio * advantages, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages
    value, clipped = torch.minimum(free, bounded), free > bounded
    if loss.dual_clip is not None:
        least = loss.dual_clip * advantages
        beyond = (advantages < 0) & (value < least)
        value, clipped = torch.where(beyond, least, value), clipped | beyond
    return value, clipped.to(mask.dtype)
