"""What answers to held-out problems say of a model, and how sure that is. Pure.

Problems are drawn independently; several answers to one problem are not. So whatever is said with an interval is a mean over problems
of their rates (of right answers among the answers that were judged), and a problem counts as one cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Estimate:
    """A value and the interval around it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Tally:
    """One problem: `right` of its `judged` answers are right. Answers without an opinion on their success are not judged."""

    judged: int
    right: int

    @property
    def rate(self) -> float:
        """Fraction of right answers. At least one must be judged."""
        return self.right / self.judged

    @classmethod
    def of(cls, successes: Sequence[bool | None]) -> Tally:
        """Of the answers to one problem."""
        known = [success for success in successes if success is not None]
        return cls(len(known), sum(known))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k answers, drawn without replacement from n of which c are right, is right.

    1 - C(n-c, k) / C(n, k): the unbiased estimator of Chen et al., arXiv 2107.03374, equation 1, as a product of factors within 0 and 1.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} answers, {c} of them right, is not defined")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_pass_at_k(tallies: Sequence[Tally], k: int) -> float | None:
    """Mean of `pass_at_k` over the problems with at least k judged answers; None: there is none."""
    values = [pass_at_k(one.judged, one.right, k) for one in tallies if one.judged >= k]
    return math.fsum(values) / len(values) if values else None


def wilson(rate: float, count: float, confidence: float) -> tuple[float, float]:
    """Wilson's score interval (J. Am. Stat. Assoc. 22, 1927): the p with |rate - p| <= z sqrt(p (1 - p) / count).

    Args:
        rate: in [0, 1]. count: of independent observations; may be a fraction; 0: nothing is known, (0, 1).
    """
    if count <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    weight = z * z / count
    middle = (rate + weight / 2) / (1 + weight)
    half = z * math.sqrt(rate * (1 - rate) / count + weight / (4 * count)) / (1 + weight)
    # Rounding alone may put an end beyond the rate at 0 and 1.
    return max(0.0, min(middle - half, rate)), min(1.0, max(middle + half, rate))


def accuracy(tallies: Sequence[Tally], confidence: float) -> Estimate:
    """Mean over problems of their rates (mean@k), with an interval that is clustered by problem.

    The clustered standard error of the mean is sqrt(sum((rate - mean)^2)) / problems, which for equal numbers of answers is that of
    Miller, arXiv 2411.00640, section 2.2. It becomes a number of independent answers, mean (1 - mean) / error^2 (Kish's effective sample
    size), for which Wilson's interval is given: never outside [0, 1], and never of width 0, as a normal one is when all answers are right.
    With one answer to each problem that number is the number of problems, so the interval is Wilson's own. It is at least the
    number of problems, and capped at that of answers.

    Problems without a judged answer are left out; without any problem the estimate is 0 within (0, 1).
    """
    judged = [one for one in tallies if one.judged]
    if not judged:
        return Estimate(0.0, 0.0, 1.0)
    problems, answers = len(judged), sum(one.judged for one in judged)
    mean = min(1.0, math.fsum(one.rate for one in judged) / problems)
    spread = math.fsum((one.rate - mean) ** 2 for one in judged) / problems
    binomial = mean * (1 - mean)
    if binomial == 0:
        effective = float(problems)
    else:
        effective = float(answers) if spread * answers <= binomial * problems else problems * binomial / spread
    return Estimate(mean, *wilson(mean, max(problems, effective), confidence))


def paired_difference(before: Sequence[float | None], after: Sequence[float | None], confidence: float) -> Estimate:
    """Mean over problems of (after - before), of two models' rates; entry i of both is of the same problem, None: no judged answer.

    Problems that either model has no judged answer to are left out. The interval is Wald+2 of Agresti and Min (Statistics in Medicine
    24, 2005): the normal interval of the paired differences (as in Miller, arXiv 2411.00640) with two more pairs, half of one at +1,
    half at -1 and one at 0, so that it has a width also when every problem is answered as before.

    Raises:
        ValueError: the two are of different lengths.
    """
    changes = [b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    count, total = len(changes), math.fsum(changes)
    if not count:
        return Estimate(0.0, -1.0, 1.0)
    middle = total / (count + 2)
    variance = (math.fsum(change * change for change in changes) + 1) / (count + 2) - middle * middle
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance / (count + 2))
    return Estimate(total / count, max(-1.0, middle - half), min(1.0, middle + half))
