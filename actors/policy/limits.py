"""Limits of an update: metrics beyond which it is not made. Pure; what follows from it, the flow decides (tasks/guards.py)."""

from __future__ import annotations

from collections.abc import Mapping

Limits = Mapping[str, tuple[float | None, float | None]]  # by metric: not above, not below
NON_FINITE = "non_finite"
SKIPPED = "skipped_steps"  # metric: 1 where float16 gradients overflowed, and so no update was made: part of finding the loss scale
FLAG = "guard/"  # prefix of the metrics that are 1 where a guard tripped, else 0


def beyond(metrics: Mapping[str, float], limits: Limits) -> list[str]:
    """The guards whose metric is beyond its limit; one that is no number is beyond any, one that was not reported is beyond none."""
    found = []
    for metric, (above, below) in limits.items():
        value = metrics.get(metric)
        if value is not None and not ((above is None or value <= above) and (below is None or value >= below)):
            found.append(guard_of(metric))
    return found


def tripped(metrics: Mapping[str, float]) -> list[str]:
    """The guards whose flag is set."""
    return [name.removeprefix(FLAG) for name, value in metrics.items() if name.startswith(FLAG) and value > 0]


def guard_of(metric: str) -> str:
    """The name of the guard that watches a metric: `logprob_error` for logprob_error/mean."""
    return metric.partition("/")[0]
