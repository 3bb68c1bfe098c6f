"""What the Prefect UI shows of a run while it goes: a progress artifact, a table of the last steps, a reward plot, the samples."""

from __future__ import annotations

import base64
from typing import Any
from uuid import UUID

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_progress_artifact, update_progress_artifact

from tasks.reporting.plots import metrics_table_markdown, reward_plot_png
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.summary import Summary, render_summary_text

_PLOT_EVERY = 10  # steps; a plot costs about 0.2 s, a table 15 ms


class Publisher:
    """Artifacts of one flow run. Call inside the flow. Keys are fixed, so the UI keeps each one's history over runs."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rows: dict[int, dict[str, Any]] = {}
        self._progress = _as_uuid(create_progress_artifact(progress=0.0, key="grpo-progress", description=f"0 of {steps} steps"))

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step's metrics."""
        self._rows.setdefault(step, {"step": step}).update(metrics)
        update_progress_artifact(self._progress, progress=100.0 * step / self._steps, description=f"{step} of {self._steps} steps")
        if step % _PLOT_EVERY == 0 or step == self._steps:
            self._publish(step)

    def finish(self, directory: RunDirectory, summary: Summary) -> None:
        """The last word: summary and where the files are."""
        text = f"```\n{render_summary_text(summary)}\n```\n\nReport: `{directory.report}`\n"
        create_markdown_artifact(markdown=text, key="grpo-summary", description=f"{directory.root.name}: {summary.status}")

    def _publish(self, step: int) -> None:
        rows = list(self._rows.values())
        create_markdown_artifact(markdown=metrics_table_markdown(rows), key="grpo-metrics", description=f"the last steps up to {step}")
        encoded = base64.b64encode(reward_plot_png(rows)).decode()
        create_image_artifact(image_url=f"data:image/png;base64,{encoded}", key="grpo-reward", description=f"reward up to step {step}")


def _as_uuid(value: Any) -> UUID:
    # prefect types the call as sync-or-async; in a sync flow it is the id.
    assert isinstance(value, UUID)
    return value
