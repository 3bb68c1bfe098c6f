"""The lines in the run's directory: metrics.jsonl and samples.jsonl. They are the run's own record; report, resume and forks read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.reporting.jsonl import LinesWriter
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.base import About, Row, Status, Tracker


class JsonLines(Tracker):
    """Every line is on disk when the call returns. Lines after a checkpoint are taken back by whoever restores it, before `open`."""

    takes_back = True

    def open(self, about: About, before: str | None) -> str:
        self._directory = RunDirectory(about.root)
        self._metrics = LinesWriter(self._directory.metrics)
        self._samples: LinesWriter | None = None  # not every flow has any
        return ""

    def metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        self._metrics.append({"step": step, **values})

    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        if self._samples is None:
            self._samples = LinesWriter(self._directory.samples)
        for row in rows:
            self._samples.append(dict(row))

    def close(self, status: Status | None) -> None:
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
