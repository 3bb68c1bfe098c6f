"""A forked run beside its parent, step by step: the same prompts and seeds up to the fork, and then one difference. Pure.

parent   1 ── 2 ── ... ── at ── at+1 ── at+2 ──►
                           └─── at+1 ── at+2 ──►   child      change of a metric = mean over the common steps of (child - parent)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from pydantic import BaseModel, ConfigDict

from configs.continuity import flat
from tasks.reporting.metrics import Row, by_step, series
from tasks.reporting.text import number

METRICS = (
    "reward/mean",
    "accuracy/validation",
    "reward/validation",
    "kl",
    "entropy",
    "response_tokens/mean",
    "grad_norm",
    "logprob_error/mean",
)
_CONFIDENCE = 0.95


class PairedChange(BaseModel):
    """Of one metric.

    Attributes:
        steps: that both runs have after the fork. parent, child: means over them.
        change: mean of (child - parent). low, high: its interval; None with fewer than two steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    steps: int
    parent: float
    child: float
    change: float
    low: float | None
    high: float | None


class Comparison(BaseModel):
    """A child against its parent.

    Attributes:
        parent: its run directory. at: the step after which they differ. changed: `field: before -> now` of each setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parent: str
    at: int
    changed: tuple[str, ...]
    changes: tuple[PairedChange, ...]


def compare(parent: Sequence[Row], child: Sequence[Row], at: int) -> tuple[PairedChange, ...]:
    """Pair the metrics of both runs by step, after step `at`. Metrics that one of them lacks are left out.

    The interval is that of a mean of dependent values: its variance is Newey and West's (Econometrica 55, 1987), with Bartlett weights
    up to lag floor(4 (n / 100)^(2/9)), since neighbouring steps train the same weights.
    """
    rows = by_step(parent), by_step(child)
    found = []
    for metric in METRICS:
        before, after = (dict(series(run, metric)) for run in rows)
        steps = sorted(step for step in before.keys() & after.keys() if step > at)
        if steps:
            found.append(_change(metric, [before[step] for step in steps], [after[step] for step in steps]))
    return tuple(found)


def markdown(comparison: Comparison) -> str:
    """The comparison as a page."""
    lines = [
        f"# Fork of {comparison.parent} after step {comparison.at}",
        "",
        *(f"* `{change}`" for change in comparison.changed or ("no setting differs",)),
        "",
        "| metric | steps | parent | child | change | 95 % interval |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for one in comparison.changes:
        interval = "" if one.low is None or one.high is None else f"{number(one.low)} to {number(one.high)}"
        cells = [one.metric, str(one.steps), number(one.parent), number(one.child), number(one.change), interval]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def changed_settings(parent: Mapping[str, Any], child: Mapping[str, Any]) -> tuple[str, ...]:
    """`field: before -> now` of each setting that differs, but for where runs and checkpoints are."""
    before, now = flat(parent), flat(child)
    names = dict.fromkeys((*before, *now))
    differing = [name for name in names if before.get(name) != now.get(name) and name not in ("resume", "output_dir", "checkpoint.url")]
    return tuple(f"{name}: {before.get(name, 'unset')} -> {now.get(name, 'unset')}" for name in differing)


def _change(metric: str, before: Sequence[float], after: Sequence[float]) -> PairedChange:
    differences = [b - a for a, b in zip(before, after, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    half = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) * math.sqrt(_variance_of_mean(differences)) if count > 1 else None
    return PairedChange(
        metric=metric, steps=count, parent=math.fsum(before) / count, child=math.fsum(after) / count, change=mean,
        low=None if half is None else mean - half, high=None if half is None else mean + half,
    )  # fmt: skip


def _variance_of_mean(values: Sequence[float]) -> float:
    count = len(values)
    mean = math.fsum(values) / count
    centred = [value - mean for value in values]
    total = math.fsum(value * value for value in centred) / count
    lags = min(math.floor(4 * (count / 100) ** (2 / 9)), count - 1)
    for lag in range(1, lags + 1):
        covariance = math.fsum(a * b for a, b in zip(centred[lag:], centred, strict=False)) / count
        total += 2 * (1 - lag / (lags + 1)) * covariance
    return max(total, 0.0) / (count - 1)
