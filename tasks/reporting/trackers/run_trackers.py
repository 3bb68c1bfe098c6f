"""All trackers of a run, as its session sees them.

metrics(step, ...) ──┬──► metrics.jsonl, samples.jsonl    at once, on disk when the call returns
samples(step, ...)   └──► an outbox for each tracker      beside the run
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Self

from configs.import_path import imported
from configs.secrets import resolve
from configs.trackers import MlflowConfig, OwnTrackerConfig, TrackerConfig, WandbConfig, labels
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import plain
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.samples import Phase, as_row
from tasks.reporting.trackers.base import About, Row, Status, Tracker
from tasks.reporting.trackers.jsonl import JsonLines
from tasks.reporting.trackers.outbox import Outbox

if TYPE_CHECKING:
    from actors.rollout.samples import Sample

_END_S, _CUT_S = 30.0, 10.0  # for all trackers together to take what is left, at the end and when the run goes back to a checkpoint
_log = logging.getLogger(__name__)


class RunTrackers:
    """Use as a context manager, once the run's lines are what they were at the checkpoint that it goes on from.

    Args:
        trackers: besides the lines. say: takes a line for the person who follows the run.
    """

    def __init__(
        self,
        directory: RunDirectory,
        trackers: Sequence[TrackerConfig] = (),
        about: About | None = None,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        rows = read_lines(directory.metrics) if directory.metrics.exists() else []
        last = max((int(row["step"]) for row in rows), default=-1)
        facts = replace(about or About(directory.root, directory.root.name), step=last)
        self._lines = JsonLines()
        self._lines.open(facts, None)
        self._outboxes = [Outbox(label, partial(build, one), facts, say) for label, one in zip(labels(trackers), trackers, strict=True)]
        said = read_lines(directory.samples) if self._outboxes and directory.samples.exists() else []
        for box in self._outboxes:
            _catch_up(box, rows, said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(None)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, in alphabetical order. A value that is not finite is null in the lines, no point elsewhere, and is logged.

        Raises:
            ValueError: a metric called `step`. TypeError: a value that is not a number; the message names the metric.
        """
        values = plain(step, metrics)
        self._lines.metrics(step, values, time.time())
        for box in self._outboxes:
            box.metrics(step, values)

    def samples(self, step: int, phase: Phase, samples: Iterable[Sample]) -> None:
        """What the model said. A reward that is not finite is null."""
        rows = [as_row(step, phase, sample) for sample in samples]
        self._lines.samples(step, phase, rows)
        for box in self._outboxes:
            box.samples(step, phase, rows)

    def close(self, status: Status | None) -> None:
        """Deliver what is left, within a bound. Idempotent. Args: status: how the run has ended; None: it goes on."""
        self._lines.close(status)
        boxes, self._outboxes = self._outboxes, []
        for box in boxes:
            box.end(status)
        deadline = time.monotonic() + (_CUT_S if status is None else _END_S)
        for box in boxes:
            box.wait(deadline)


def build(config: TrackerConfig) -> Tracker:
    """The tracker that the entry names."""
    settings = config.settings
    if isinstance(settings, OwnTrackerConfig):
        made: Tracker = imported(settings.import_path, "trackers.python.import_path")(
            **resolve(settings.options, "trackers.python.options")
        )
        return made
    if isinstance(settings, MlflowConfig):
        from tasks.reporting.trackers.mlflow import Mlflow

        return Mlflow(settings)
    if isinstance(settings, WandbConfig):
        from tasks.reporting.trackers.wandb import Wandb

        return Wandb(settings)
    from tasks.reporting.trackers.tensorboard import Tensorboard

    return Tensorboard()


def _catch_up(box: Outbox, rows: Sequence[Row], said: Sequence[Row]) -> None:
    """What the lines have from before goes to the tracker, which takes what it does not have."""
    for row in rows:
        box.metrics(row["step"], {name: value for name, value in row.items() if name != "step"})
    for (step, phase), group in groupby(said, key=lambda row: (row["step"], row["phase"])):
        box.samples(step, phase, list(group))
