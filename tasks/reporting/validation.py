"""Validation before and after, side by side, for each set and source. From metrics.jsonl.

accuracy/SET, /low, /high, /SOURCE; pass@K/SET; reward/SET; length/SET; truncated/SET, timed_out/SET, ... ──► table, lines of a chart
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from configs.validation import OWN_SET
from tasks.reporting.metrics import Row, by_step
from tasks.reporting.text import ABSENT, change, estimate, number, score, share, shown, visible
from tasks.reporting.views import COLORS, Chart, Series

_ENDS = ("low", "high")
Triple = tuple[float, float, float]  # a value, and its interval


@dataclass(frozen=True)
class Measure:
    """One number of a set: text of the first validation, of the last, and of what changed between them; "" without a last one."""

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class SetTable:
    """The numbers of one validation set.

    Attributes:
        steps: of its first and its last validation; None: there was one only.
    """

    name: str
    steps: tuple[int, int | None]
    measures: tuple[Measure, ...]


def set_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Validation sets with an accuracy, the environment's own first."""
    found = {key.removeprefix("accuracy/"): None for row in rows for key in row if key.startswith("accuracy/") and key.count("/") == 1}
    return sorted(found, key=lambda name: name != OWN_SET)


def set_tables(rows: Sequence[Row], gains: Mapping[str, Triple | None]) -> list[SetTable]:
    """A table for each set.

    Args:
        rows: one per step, in order. gains: by set, the paired difference of accuracies with its interval, where it is known.
    """
    tables = []
    for name in set_names(rows):
        done = [row for row in rows if row.get(f"accuracy/{name}") is not None]
        if done:
            last = done[-1] if len(done) > 1 else None
            steps = int(done[0]["step"]), int(last["step"]) if last else None
            tables.append(SetTable(name, steps, tuple(_measures(name, done[0], last, gains.get(name)))))
    return tables


def validation_rows(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """All sets as rows of one table in the Prefect UI. `metrics`: lines of metrics.jsonl."""
    return [
        {
            "set": visible(table.name),
            "measure": visible(one.name),
            "before": one.before,
            "after": one.after or ABSENT,
            "difference": one.change or ABSENT,
        }
        for table in set_tables(by_step(metrics), {})
        for one in table.measures
    ]


def with_sets(charts: Sequence[Chart], rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The charts, with a line for each further set in the one that shows the accuracy of the environment's own."""
    others = [name for name in set_names(rows) if name != OWN_SET]
    more = [Series(visible(name), f"accuracy/{name}", color) for color, name in enumerate(others[: COLORS - 1], start=2)]
    return [
        replace(chart, series=(replace(chart.series[0], label=OWN_SET), *more))
        if more and [one.metric for one in chart.series] == [f"accuracy/{OWN_SET}"]
        else chart
        for chart in charts
    ]


def _measures(name: str, before: Row, after: Row | None, gain: Triple | None) -> list[Measure]:
    keys = {**before, **(after or {})}
    metric = f"accuracy/{name}"
    difference = "" if after is None else change(*(gain or (after[metric] - before[metric], None, None)))
    found = [Measure("accuracy", _estimate(before, metric), _estimate(after, metric) if after else "", difference)]
    sources = sorted(key for key in keys if key.startswith(f"{metric}/") and key.removeprefix(f"{metric}/") not in _ENDS)
    found += [_measure(f"accuracy, {key.removeprefix(f'{metric}/')}", key, before, after, score, change) for key in sources]
    passes = sorted(int(match[1]) for key in keys if (match := re.fullmatch(rf"pass@(\d+)/{re.escape(name)}", key)))
    found += [_measure(f"pass@{k}", f"pass@{k}/{name}", before, after, score, change) for k in passes if k > 1]  # pass@1 is the accuracy
    found.append(_measure("reward", f"reward/{name}", before, after, score, change))
    if f"length/{name}" in keys:
        found.append(_measure("mean length, tokens", f"length/{name}", before, after, number, partial(shown, spec="+.1f")))
    for part in ("truncated", "timed_out", "failed", "no_opinion"):
        values = [row.get(f"{part}/{name}") for row in (before, after) if row]
        if any(values) or (part == "truncated" and f"{part}/{name}" in keys):
            found.append(_measure(part.replace("_", " "), f"{part}/{name}", before, after, share, partial(shown, spec="+.1%")))
    return found


def _measure(
    label: str, metric: str, before: Row, after: Row | None, form: Callable[[float | None], str], changed: Callable[[float | None], str]
) -> Measure:
    first = before.get(metric)
    if after is None:
        return Measure(label, form(first), "", "")
    last = after.get(metric)
    return Measure(label, form(first), form(last), changed(None if first is None or last is None else last - first))


def _estimate(row: Row, metric: str) -> str:
    return estimate(row.get(metric), row.get(f"{metric}/low"), row.get(f"{metric}/high"))
