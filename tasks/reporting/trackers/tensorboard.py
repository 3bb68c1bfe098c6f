"""TensorBoard: event files in the run's directory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.base import About, Row, Status, Tracker, table


class Tensorboard(Tracker):
    """One scalar per metric, and a table of text per phase."""

    takes_back = True

    def open(self, about: About, before: str | None) -> str:
        directory = RunDirectory(about.root).tensorboard
        there = any(directory.glob("events.*"))  # else the run goes on in another directory, and all its steps come again
        self._events = EventFileWriter(str(directory))
        # At every START but the first TensorBoard drops events from its step on that came before it.
        self._events.add_event(Event(wall_time=time.time(), step=about.step + 1, session_log=SessionLog(status=SessionLog.START)))
        return before if before is not None and there else uuid.uuid4().hex

    def metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None]
        self._events.add_event(Event(wall_time=at, step=step, summary=Summary(value=scalars)))
        self._events.flush()

    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        columns, cells = table(rows)
        text = np.array([columns, *([str(cell) for cell in row] for row in cells)], dtype=np.object_)  # [1 + samples, columns]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=text_pb(f"samples/{phase}", text)))
        self._events.flush()

    def close(self, status: Status | None) -> None:
        self._events.close()
