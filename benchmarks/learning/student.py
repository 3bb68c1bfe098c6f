"""Student's t interval of a mean of few numbers, as of differences between two runs of each seed. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from actors.rollout.statistics import Estimate

# Student's t, 0.975 quantile, by degrees of freedom from 1; beyond these the last one counts, at most 7 % too wide.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)


def mean_95(values: Sequence[float]) -> Estimate:
    """The mean and its 95 % interval, mean ± t s / √n with n - 1 degrees of freedom; of one value the interval is without bounds.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("the mean of no values")
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Estimate(mean, -math.inf, math.inf)
    half = _T[min(count - 1, len(_T)) - 1] * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)
