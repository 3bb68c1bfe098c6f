"""RLOO: REINFORCE with the other responses' mean as the baseline (Ahmadian et al., arXiv 2402.14740, section 2.2; Kool et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from actors.policy.objectives.advantages.group_relative import centre


def rloo(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """A_i = r_i - mean of the other rewards = G / (G - 1) (r_i - mean(r)). One reward alone, and equal rewards, give zeros.

    The baseline does not depend on its own response, so the gradient is unbiased for every G.

    Args:
        normalize: divide by the group's standard deviation, which the paper does not.
    """
    centred, deviation = centre(rewards)
    if deviation == 0:
        return [0.0] * len(rewards)
    factor = len(rewards) / (len(rewards) - 1) / (deviation if normalize else 1.0)
    return [factor * value for value in centred]
