"""Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """A_i = (r_i - mean(r)) / std(r) over one prompt's responses; without `normalize`, r_i - mean(r) (Dr. GRPO, arXiv 2503.20783).

    std is the population's (divide by G): the group is all there is, not a sample of a larger one. Equal rewards give zeros.
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    if deviation <= 1e-8 * max(1.0, *map(abs, rewards)):  # equal but for rounding
        return [0.0] * len(rewards)
    return [value / deviation for value in centred] if normalize else centred
