"""What the Prefect UI shows of a run while it goes: a progress artifact, a table of the last steps, a plot, the summary."""

from __future__ import annotations

import base64
from typing import Any
from uuid import UUID

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_progress_artifact, update_progress_artifact

from tasks.reporting.plots import metrics_table_markdown, picture_png
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.summary import Summary, render_summary_text
from tasks.reporting.views import VIEWS, FlowName

_PLOT_EVERY = 10  # steps; a plot costs about 0.2 s, a table 15 ms


class Publisher:
    """Artifacts of one flow run. Call inside the flow. Keys are those of the flow, so the UI keeps each one's history over runs."""

    def __init__(self, flow: FlowName) -> None:
        self._flow, self._view = flow, VIEWS[flow]
        self._rows: dict[int, dict[str, Any]] = {}

    def begin(self, steps: int) -> None:
        """The run is to have this many steps. Call before the first `update`."""
        self._steps = steps
        key = f"{self._flow}-progress"
        self._progress = _as_uuid(create_progress_artifact(progress=0.0, key=key, description=f"0 of {steps} steps"))

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step's metrics."""
        self._rows.setdefault(step, {"step": step}).update(metrics)
        update_progress_artifact(self._progress, progress=100.0 * step / self._steps, description=f"{step} of {self._steps} steps")
        if step % _PLOT_EVERY == 0 or step == self._steps:
            self._publish(step)

    def finish(self, directory: RunDirectory, summary: Summary) -> None:
        """The last word: summary and where the files are."""
        text = f"```\n{render_summary_text(summary)}\n```\n\nReport: `{directory.report}`\n"
        create_markdown_artifact(markdown=text, key=f"{self._flow}-summary", description=f"{directory.root.name}: {summary.status}")

    def _publish(self, step: int) -> None:
        rows = list(self._rows.values())
        table = metrics_table_markdown(rows, self._view)
        create_markdown_artifact(markdown=table, key=f"{self._flow}-metrics", description=f"the last steps up to {step}")
        if not self._view.charts:
            return
        image, picture = base64.b64encode(picture_png(rows, self._view)).decode(), self._view.picture
        create_image_artifact(
            image_url=f"data:image/png;base64,{image}", key=f"{self._flow}-{picture}", description=f"{picture} up to step {step}"
        )


def _as_uuid(value: Any) -> UUID:
    # prefect types the call as sync-or-async; in a sync flow it is the id.
    assert isinstance(value, UUID)
    return value
