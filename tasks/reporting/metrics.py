"""The numbers of a run, twice: lines that any program reads, and TensorBoard scalars.

    write(step, metrics) ──┬──► metrics.jsonl   {"step": 3, "kl": 0.001, "reward/mean": 0.5, ...}
                           └──► tensorboard/    one scalar per metric

A step may be written more than once (its validation comes later); `by_step` joins the lines.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as ScalarSummary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tasks.reporting.jsonl import LinesWriter
from tasks.reporting.run_dir import RunDirectory

_log = logging.getLogger(__name__)

Row = dict[str, Any]


class MetricsWriter(LinesWriter):
    """Appends the metrics of a run. Use as a context manager."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory.metrics)
        self._events = EventFileWriter(str(directory.tensorboard))

    def close(self) -> None:
        """Flush and close both files. Idempotent."""
        super().close()
        self._events.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line, on disk when the call returns: the step, then the metrics in alphabetical order.

        A value that is not finite is written as null (JSON has no NaN), is no TensorBoard point, and is logged.

        Raises:
            ValueError: a metric called `step`.
            TypeError: a value that is not a number; the message names the metric.
        """
        if "step" in metrics:
            raise ValueError("no metric may be called 'step': that is the key of the line's step")
        values = {name: self._finite(step, name, metrics[name]) for name in sorted(metrics)}
        self.append({"step": step, **values})
        scalars = [ScalarSummary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=ScalarSummary(value=scalars)))
        self._events.flush()

    def _finite(self, step: int, name: str, value: float) -> float | None:
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
