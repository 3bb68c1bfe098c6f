"""MaxRL: rewards weighed by the inverse of their mean (Tajwar et al., "Maximum likelihood reinforcement learning", arXiv 2602.02710)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actors.policy.objectives.advantages.group_relative import centre


def max_likelihood(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """A_i = (r_i - mean(r)) / mean(r).

    With rewards 0 and 1, mean(r) estimates the chance p of success: the gradient is that of log p, up to the order that G responses allow,
    where the policy gradient's is that of p. So a prompt that rarely succeeds counts more. Equal rewards give zeros.

    Args:
        normalize: has no effect: the mean takes the place of the standard deviation.

    Raises:
        ValueError: a reward is negative, so that their mean is no chance of anything.
    """
    if min(rewards) < 0:
        raise ValueError(f"policy.loss.advantages max_likelihood wants rewards of 0 and above, and one is {min(rewards):g}")
    centred, deviation = centre(rewards)
    if deviation == 0:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [value / mean for value in centred]
