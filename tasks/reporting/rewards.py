"""What a person sees of rewards: each one's mean over the steps, and how many responses it had no value for. From metrics.jsonl.

rewards/NAME/mean, /timed_out, /failed, /no_opinion; scoring/timed_out, /failed, /dropped, /slowest_s ──► table, chart
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.reporting.metrics import by_step, series
from tasks.reporting.text import duration, score, share, visible
from tasks.reporting.views import COLORS, Chart, Series

_PARTS = ("mean", "timed_out", "failed", "no_opinion")
ALL = "all responses"


@dataclass(frozen=True)
class RewardRow:
    """One reward over the run.

    Attributes:
        first, last, mean: of the steps' means of its raw values. timed_out, failed, no_opinion, dropped: means of the steps' fractions.
        slowest_s: longest scoring of a response.
    """

    label: str
    first: float | None = None
    last: float | None = None
    mean: float | None = None
    timed_out: float | None = None
    failed: float | None = None
    no_opinion: float | None = None
    dropped: float | None = None
    slowest_s: float | None = None


def reward_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rewards that any row has metrics of, in the order of the first that has them."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            head, _, rest = key.partition("/")
            name, _, part = rest.rpartition("/")
            if head == "rewards" and name and part in _PARTS:
                names[name] = None
    return list(names)


def reward_table(rows: Sequence[Mapping[str, Any]]) -> list[RewardRow]:
    """A row for each reward, then one for all responses; empty without such metrics. `rows`: one per step, in order."""
    table = []
    for name in reward_names(rows):
        means = [value for _, value in series(rows, f"rewards/{name}/mean")]
        fractions = {part: _mean(rows, f"rewards/{name}/{part}") for part in _PARTS[1:]}
        first, last = (means[0], means[-1]) if means else (None, None)
        table.append(RewardRow(name, first, last, _mean(rows, f"rewards/{name}/mean"), **fractions))
    slowest = max((value for _, value in series(rows, "scoring/slowest_s")), default=None)
    fractions = {part: _mean(rows, f"scoring/{part}") for part in ("timed_out", "failed", "dropped")}
    if slowest is not None or any(value is not None for value in fractions.values()):
        table.append(RewardRow(ALL, slowest_s=slowest, **fractions))
    return table


def reward_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Means over steps, of the first rewards when there are more than colours; and what was not scored, if anything was not."""
    names = [name for name in reward_names(rows) if series(rows, f"rewards/{name}/mean")]
    lines = tuple(Series(visible(name), f"rewards/{name}/mean", color) for color, name in enumerate(names[:COLORS], start=1))
    charts = [Chart("Rewards", "raw values, mean of the batch", lines, bounds=(0.0, 0.0))] if lines else []
    parts = (("timed out", "scoring/timed_out", 2), ("failed", "scoring/failed", 4), ("dropped", "scoring/dropped", 1))
    if any(value for _, metric, _ in parts for _, value in series(rows, metric)):
        charts.append(Chart("Not scored", "fraction of the responses", tuple(Series(*part) for part in parts), bounds=(0.0, 0.0)))
    return charts


def reward_rows(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """`reward_table` as rows of a table in the Prefect UI; empty without such metrics. `metrics`: lines of metrics.jsonl."""
    return [
        {
            "reward": visible(row.label),
            "first step": score(row.first),
            "last step": score(row.last),
            "mean": score(row.mean),
            "timed out": share(row.timed_out),
            "failed": share(row.failed),
            "no opinion": share(row.no_opinion),
            "dropped": share(row.dropped),
            "slowest": duration(row.slowest_s),
        }
        for row in reward_table(by_step(metrics))
    ]


def _mean(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    values = [value for _, value in series(rows, metric)]
    return math.fsum(values) / len(values) if values else None
