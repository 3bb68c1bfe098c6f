"""What the Prefect UI shows of a run while it goes. Artifacts of the flow run, one of each, rewritten in place.

    update, samples ──► rows in memory ──► every 2 s, a thread of its own ──► <flow>-progress, -metrics, -rewards, -validation, -samples
         (µs)                                  └─ every 20 s ──► <flow>-<picture>, report.html as it stands
    begin: <flow>-page, the link to the report        finish: what is left, then <flow>-summary

An artifact costs 15 ms and a picture 30, so a step only notes what there is to show. What is published is always the newest state: a write
that failed (the server was away) is made good by the next one, and the log counts it. Any other error ends the run, at its next step.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterable
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from actors.rollout.samples import Sample, SlowSample
from configs import settings
from tasks.reporting.html import write_report
from tasks.reporting.plots import picture_svg, sample_rows, step_rows
from tasks.reporting.rewards import reward_rows
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.samples import Phase, as_row
from tasks.reporting.slowest import slow_row, slowest_first, slowest_rows
from tasks.reporting.summary import Summary, render_summary_text
from tasks.reporting.validation import validation_rows
from tasks.reporting.views import VIEWS, FlowName

_EVERY_S, _PICTURE_EVERY_S = 2.0, 20.0
_PAGE_SHARE = 0.02  # of the time goes to writing the report of a run that goes on: a long one's takes a second
_KEPT_SLOW = 50


class Publisher:
    """Artifacts of one flow run. Make it inside the flow. Keys are those of the flow, so the UI keeps each one's history over runs."""

    def __init__(self, flow: FlowName) -> None:
        self._flow, self._view = flow, VIEWS[flow]
        self._flow_run_id = UUID(runtime.flow_run.id)
        self._log: Any = get_run_logger()
        self._client = get_client(sync_client=True)
        self._ids: dict[str, UUID] = {}
        self._lock = threading.Lock()  # of the three below
        self._rows: dict[int, dict[str, Any]] = {}
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._slowest: list[dict[str, Any]] = []
        self._changed = False
        self._steps, self._step, self._failures = 0, 0, 0
        self._directory: RunDirectory | None = None
        self._running: Summary | None = None  # for the next report of the run that goes on
        self._page_at = 0.0  # when the next one may be written
        self._error: Exception | None = None
        self._ending = threading.Event()
        # In this context: Prefect's settings are in it, and a thread without them would report to a server of its own.
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="publisher", daemon=True)

    def begin(self, steps: int, directory: RunDirectory, summary: Summary) -> None:
        """The run is to have this many steps. Call before the first `update`."""
        self._steps, self._changed = steps, True
        self._directory, self._running = directory, summary
        self._thread.start()

    @property
    def page_due(self) -> bool:
        """Whether `page` should be called."""
        return self._running is None and time.monotonic() >= self._page_at

    def page(self, summary: Summary) -> None:
        """How the run stands, for its report. Returns at once."""
        self._running = summary

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """A step's metrics; returns at once.

        Raises:
            Exception: what went wrong in the thread, unless it was the server.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            self._rows.setdefault(step, {"step": step}).update(metrics)
            self._step, self._changed = step, True

    def samples(self, step: int, phase: Phase, samples: Iterable[Sample], slowest: Iterable[SlowSample] = ()) -> None:
        """What the model said, of which the newest of each phase are shown, and what took longest to score so far. Returns at once."""
        with self._lock:
            self._samples[phase] = [as_row(step, phase, sample) for sample in samples]
            self._slowest = slowest_first([*self._slowest, *(slow_row(step, phase, one) for one in slowest)], _KEPT_SLOW)
            self._changed = True

    def stop(self) -> None:
        """End the thread. Call before the last report is written: it must not be followed by one of a run that goes on."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def finish(self, directory: RunDirectory, summary: Summary) -> None:
        """The last state of everything, the summary, and where the files are."""
        self.stop()
        text = f"```\n{render_summary_text(summary)}\n```\n\n[report.html]({directory.report.as_uri()}) in `{directory.root}`\n"
        try:
            if self._steps:
                self._publish(pictures=True)
            self._show("markdown", "summary", text, f"{directory.root.name}: {summary.status}")
        except (httpx.HTTPError, PrefectException) as error:
            self._failed(error)
        if self._failures:
            self._log.warning("%d writes of artifacts failed; the files in %s have everything", self._failures, directory.root)
        if self._error is not None:
            self._log.error("the artifacts are not complete", exc_info=self._error)

    def _work(self) -> None:
        pictured = time.monotonic()
        self._write_page()
        while not self._ending.wait(_EVERY_S):
            pictures = time.monotonic() - pictured >= _PICTURE_EVERY_S
            try:
                self._publish(pictures)
            except (httpx.HTTPError, PrefectException) as error:
                self._failed(error)
            except Exception as error:  # noqa: BLE001  (raised in the flow's thread)
                self._error = error
                return
            if pictures:
                pictured = time.monotonic()
                self._write_page()

    def _write_page(self) -> None:
        summary, directory = self._running, self._directory
        if summary is None or directory is None:
            return
        began = time.monotonic()
        try:
            write_report(directory, summary)
        except (OSError, ValueError) as error:  # the run does not depend on it; its end writes it again, and says so
            self._log.warning("report.html could not be written: %s", error)
        ended = time.monotonic()
        self._page_at, self._running = ended + max(_PICTURE_EVERY_S, (ended - began) / _PAGE_SHARE), None

    def _link(self, directory: RunDirectory) -> str:
        """To the report: over HTTP where somebody serves it, else where it lies."""
        pages, url = settings.get(settings.PAGES), settings.get(settings.PAGES_URL)
        if pages is None or url is None or not Path(pages).is_dir():
            return f"`{directory.report}`: a browser opens it"
        link = Path(pages) / str(self._flow_run_id)
        link.unlink(missing_ok=True)  # of the run before it was retried
        link.symlink_to(directory.root)
        return f"[{directory.root.name}]({url}/{self._flow_run_id})"

    def _failed(self, error: Exception) -> None:
        self._changed = True  # again at the next turn
        self._failures += 1
        if self._failures == 1:
            self._log.warning("an artifact could not be written (%s: %s); trying again", type(error).__name__, error)

    def _publish(self, pictures: bool) -> None:
        with self._lock:
            if not self._changed and not pictures:
                return
            self._changed = False
            rows, samples = [dict(row) for row in self._rows.values()], [row for phase in self._samples.values() for row in phase]
            step, slow = self._step, self._slowest
        if self._directory is not None and "page" not in self._ids:
            text = f"The run's page, written anew every {_PICTURE_EVERY_S:.0f} s: {self._link(self._directory)}"
            self._show("markdown", "page", text, "curves with zoom, time, rewards, samples with a filter")
        self._show("progress", "progress", 100.0 * step / self._steps, f"{step} of {self._steps} steps")
        for name, table, what in (
            ("metrics", step_rows(rows, self._view), f"the last steps up to {step}"),
            ("rewards", reward_rows(rows), "each reward's mean, and responses without a value"),
            ("validation", validation_rows(rows), "held-out problems, by set"),
            ("slowest", slowest_rows(slow), "the responses that took longest to score"),
            ("samples", sample_rows(samples), "what the model said last, in training and in validation"),
        ):
            if table:
                self._show("table", name, json.dumps(table), what)
        if rows and pictures and self._view.charts:
            picture = base64.b64encode(picture_svg(rows, self._view).encode()).decode()
            self._show("image", self._view.picture, f"data:image/svg+xml;base64,{picture}", f"up to step {step}")

    def _show(self, kind: str, name: str, data: Any, description: str) -> None:
        if name in self._ids:
            self._client.update_artifact(self._ids[name], ArtifactUpdate(data=data, description=description))
            return
        fresh = ArtifactCreate(type=kind, key=f"{self._flow}-{name}", data=data, description=description, flow_run_id=self._flow_run_id)
        self._ids[name] = self._client.create_artifact(fresh).id
