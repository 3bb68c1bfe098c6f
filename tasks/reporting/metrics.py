"""The numbers of a run: plain values for its trackers, and what becomes of the lines of metrics.jsonl.

    {"step": 3, "kl": 0.001, "reward/mean": 0.5, ...}

A step may be written more than once (its validation comes later); `by_step` joins the lines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

_log = logging.getLogger(__name__)

Row = dict[str, Any]


def plain(step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Python's numbers, in alphabetical order. One that is not finite is None (JSON has no NaN), and is logged.

    Raises:
        ValueError: a metric called `step`.
        TypeError: a value that is not a number; the message names the metric.
    """
    if "step" in metrics:
        raise ValueError("no metric may be called 'step': that is the key of the line's step")
    return {name: _finite(step, name, metrics[name]) for name in sorted(metrics)}


def _finite(step: int, name: str, value: float) -> float | None:
    try:
        number = value if type(value) is int else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"step {step}, metric {name!r}: {value!r} is not a number") from error
    if math.isfinite(number):
        return number
    _log.warning("step %d: metric %s is %s: written as null", step, name, number)
    return None


def by_step(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per step, in the order of steps: the lines of a step joined, a later value over an earlier one."""
    joined: dict[int, Row] = {}
    for row in rows:
        joined.setdefault(int(row["step"]), {}).update(row)
    return [joined[step] for step in sorted(joined)]


def series(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, without the steps that have no finite value for it."""
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None and math.isfinite(row[name])]
