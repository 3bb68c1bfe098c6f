"""REINFORCE++'s advantages (Hu et al., arXiv 2501.03262): each token's return, without a baseline, over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reinforce(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """A_i = r_i: no baseline. With the KL in the reward `returns` takes each token's penalties off, and `whiten` is its normalization.

    Args:
        normalize: has no effect: a group is no unit here, so that one response to a prompt would do.
    """
    return [float(reward) for reward in rewards]


def returns(reward: float, penalties: torch.Tensor) -> torch.Tensor:
    """A_t = r - Σ_{s >= t} penalty_s (eq. 8): the return from token t on, undiscounted, of an outcome reward at the last token.

    Args:
        penalties: [len], 0 outside the response.
    """
    return reward - penalties.flip(0).cumsum(0).flip(0)


def whiten(advantages: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(A_t - mean(A)) / std(A) over the tokens of the batch (eq. 10), std the population's; zeros where all are equal, and off the masks.

    Args:
        advantages: [len] each. masks: [len] bool, of the tokens that count.
    """
    counted = [values[mask] for values, mask in zip(advantages, masks, strict=True)]
    tokens = torch.cat(counted) if counted else torch.empty(0)
    if not len(tokens) or (deviation := float(tokens.std(correction=0))) <= 1e-8 * max(1.0, float(tokens.abs().max())):
        return [torch.zeros_like(values) for values in advantages]
    mean = tokens.mean()
    return [(values - mean) / deviation * mask for values, mask in zip(advantages, masks, strict=True)]
