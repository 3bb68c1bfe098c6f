"""What the Prefect UI shows of the metrics: a plot for an image artifact, a table for a markdown artifact."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.reporting.metrics import by_step, series
from tasks.reporting.text import number, score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GRAY = "#2a78d6", "#eb6834", "#63625d"


def reward_plot_png(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """Reward (training and validation) and validation accuracy over steps: a PNG of 1200 x 480 pixels on white.

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
    left, right = figure.subplots(1, 2)
    _style(left, "Reward")
    drawn = _draw(left, series(rows, "reward/mean"), _BLUE, "training, mean of the batch")
    drawn += _draw(left, series(rows, "reward/validation"), _ORANGE, "validation, greedy")
    if drawn:
        left.legend(frameon=False, fontsize=9, labelcolor=_GRAY)
    _style(right, "Validation accuracy")
    _draw(right, series(rows, "accuracy/validation"), _BLUE, "accuracy")
    right.set_ylim(-0.02, 1.02)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def metrics_table_markdown(metrics: Sequence[Mapping[str, Any]], last: int = 10) -> str:
    """A markdown table of the last steps, newest at the bottom. Values that a step does not have are dashes."""
    head = ["step", "reward", "accuracy", "KL", "loss", "tokens/s", "s/step"]
    lines = [_line(head), _line(["---:"] * len(head))]
    for row in by_step(metrics)[-last:]:
        values = [
            str(row["step"]),
            score(row.get("reward/mean")),
            score(row.get("accuracy/validation")),
            *(number(row.get(name)) for name in ("kl", "loss", "tokens_per_s", "time/step")),
        ]
        lines.append(_line(values))
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
