"""What the Prefect UI shows of the metrics: a plot for an image artifact, a table for a markdown artifact."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.reporting.metrics import by_step, series
from tasks.reporting.text import ABSENT
from tasks.reporting.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALETTE = {1: "#2a78d6", 2: "#eb6834"}
_GRAY = "#63625d"


def picture_png(metrics: Sequence[Mapping[str, Any]], view: View) -> bytes:
    """The view's first two charts side by side: a PNG of 1200 x 480 pixels on white.

    Args:
        metrics: lines of metrics.jsonl, or any rows with `step`; may be empty.
    """
    # Here, not above: importing matplotlib takes seconds, which --help and --dry-run should not.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = by_step(metrics)
    # The object interface, not pyplot: no global state, so it may run in any thread.
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, chart in zip(figure.subplots(1, 2), view.charts, strict=False):
        _style(axes, chart.title)
        drawn = sum(_draw(axes, series(rows, one.metric), _PALETTE[one.color], one.label) for one in chart.series)
        if drawn and len(chart.series) > 1:
            axes.legend(frameon=False, fontsize=9, labelcolor=_GRAY)
        if chart.bounds == (0.0, 1.0):
            axes.set_ylim(-0.02, 1.02)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def metrics_table_markdown(metrics: Sequence[Mapping[str, Any]], view: View, last: int = 10) -> str:
    """A markdown table of the last steps, newest at the bottom. Values that a step does not have are dashes."""
    head = ["step", *(column.heading for column in view.table)]
    lines = [_line(head), _line(["---:"] * len(head))]
    lines += [
        _line([str(row["step"]), *(column.form(row.get(column.metric), ABSENT) for column in view.table)])
        for row in by_step(metrics)[-last:]
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _style(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=10)
    axes.set_xlabel("step", color=_GRAY)
    axes.grid(axis="y", color="#ecebe6")
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_GRAY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9c8c2")


def _draw(axes: Axes, points: Sequence[tuple[int, float]], color: str, label: str) -> int:
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5 if len(points) <= 60 else 0, label=label)
    return len(points)
