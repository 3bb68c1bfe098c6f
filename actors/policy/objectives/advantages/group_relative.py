"""GRPO's advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2), and those of Dr. GRPO and REINFORCE++ with a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_relative(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """A_i = (r_i - mean(r)) / std(r).

    std is the population's (divide by G): the group is all there is, not a sample of a larger one. Equal rewards give zeros.

    Args:
        normalize: False leaves out the division: Dr. GRPO (arXiv 2503.20783); REINFORCE++ with a baseline (arXiv 2501.03262) then
            divides by the standard deviation of the whole batch (`over_the_batch`).
    """
    centred, deviation = centre(rewards)
    if deviation == 0:
        return [0.0] * len(rewards)
    return [value / deviation for value in centred] if normalize else centred


def centre(rewards: Sequence[float]) -> tuple[list[float], float]:
    """The rewards less their mean, and the standard deviation of the population: 0 where they are equal but for rounding."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return centred, deviation if deviation > 1e-8 * max(1.0, *map(abs, rewards)) else 0.0


def over_the_batch(advantages: Sequence[float]) -> list[float]:
    """A_i / std(A) over the batch (REINFORCE++, arXiv 2501.03262, eq. 9); zeros where all are equal.

    The paper also subtracts the batch's mean. With a baseline in each group that is 0, and responses of equal rewards stay at 0.
    """
    _, deviation = centre(advantages) if advantages else ([], 0.0)
    return [value / deviation if deviation else 0.0 for value in advantages]
