"""What the Prefect UI shows of a run: its charts as one picture, the last steps and some samples as table rows.

Its other tables: `rewards.reward_rows`, `validation.validation_rows`, `slowest.slowest_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tasks.reporting.charts import HEIGHT, WIDTH, Line, line_chart
from tasks.reporting.metrics import Row, by_step, series
from tasks.reporting.slowest import outcome
from tasks.reporting.text import score, visible
from tasks.reporting.validation import with_sets
from tasks.reporting.views import Chart, View

_COLUMNS, _GAP, _HEAD = 2, 24, 44  # charts side by side, and pixels: around a chart, above it
_PALETTE = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#4a3aa7", "#008300")  # the report's, light
_SERIES = "".join(f" .line.s{i} {{ stroke: {c} }} .dot.s{i}, .label.s{i} {{ fill: {c} }}" for i, c in enumerate(_PALETTE, 1))
_STYLE = Markup(  # of charts.py, where the report has its style sheet
    "text { font: 11.5px system-ui, 'DejaVu Sans', sans-serif; fill: #63625d } .end { fill: #1b1b19; font-weight: 600 }"
    " .title { font-size: 15px; font-weight: 600; fill: #1b1b19 } .line { fill: none; stroke-width: 2; stroke-linejoin: round }"
    " .thin { stroke-width: 1 } .dot { stroke: #fff } .grid { fill: none; stroke: #ecebe6 } .base { fill: none; stroke: #b1b0ae }" + _SERIES
)
_LONGEST_CELL = 300


def picture_svg(metrics: Sequence[Mapping[str, Any]], view: View) -> str:
    """All charts of the view, two side by side, as an SVG on white that stands alone (for an `<img>`).

    Args:
        metrics: lines of metrics.jsonl, or any rows with `step`; may be empty.
    """
    rows = by_step(metrics)
    return charts_svg(rows, with_sets(view.charts, rows))


def charts_svg(rows: Sequence[Row], charts: Sequence[Chart]) -> str:
    """The same of these charts. Args: rows: of `by_step`."""
    steps = (int(rows[0]["step"]), int(rows[-1]["step"])) if rows else (0, 0)
    across, down = WIDTH + _GAP, HEIGHT + _HEAD + _GAP
    width, height = _COLUMNS * across + _GAP, -(-len(charts) // _COLUMNS) * down
    head = Markup('<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}"><style>{2}</style>').format(
        width, height, _STYLE
    )
    back = Markup('<path fill="#fff" d="M0 0H{}V{}H0Z"/>').format(width, height)
    placed = [
        _place(chart, rows, steps, _GAP + number % _COLUMNS * across, _GAP // 2 + number // _COLUMNS * down)
        for number, chart in enumerate(charts)
    ]
    return str(Markup("").join([head, back, *placed, Markup("</svg>")]))


def step_rows(metrics: Sequence[Mapping[str, Any]], view: View, last: int = 10) -> list[dict[str, str]]:
    """The last steps as table rows, newest first. Values that a step does not have are dashes."""
    rows = by_step(metrics)[-last:]
    columns = [column for column in view.table if not column.rare or any(column.has(row) for row in rows)]
    return [{"step": str(row["step"]), **{column.heading: column.show(row) for column in columns}} for row in reversed(rows)]


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Samples (as `samples.as_row` makes them) as table rows, in their order. Long texts are cut."""
    return [
        {
            "step": str(sample["step"]),
            "phase": str(sample["phase"]),
            "prompt": _cut(sample["prompt"]),
            "response": _cut(sample["response"]),
            "answer": _cut(sample["answer"]),
            "reward": _reward(sample),
            "weights": str(sample["weight_version"]),
        }
        for sample in samples
    ]


def _reward(sample: Mapping[str, Any]) -> str:
    said = str(sample.get("outcome", "scored"))  # absent: of an older run
    return score(sample["reward"]) + ("" if said == "scored" else f", {outcome(said)}")


def _cut(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def _place(chart: Chart, rows: Sequence[Row], steps: tuple[int, int], left: int, top: int) -> Markup:
    lines = [Line(one.label, series(rows, one.metric), one.color) for one in chart.series]
    parts = [Markup('<text class="title" x="{}" y="{}">{}</text>').format(left, top + 15, chart.title)]
    parts.append(Markup('<text x="{}" y="{}">{}</text>').format(left, top + 32, chart.note))
    if any(line.points for line in lines):
        drawn = line_chart(lines, title=chart.title, steps=steps, bounds=chart.bounds, log=chart.log, tooltips=False)
        frame = Markup('<svg x="{}" y="{}" width="{}" height="{}" ').format(left, top + _HEAD, WIDTH, HEIGHT)
        parts.append(drawn.replace("<svg ", frame, 1))
    else:
        parts.append(Markup('<text x="{}" y="{}">no values yet</text>').format(left + WIDTH // 2, top + _HEAD + HEIGHT // 2))
    if len(lines) > 1:
        labels = Markup("").join(
            Markup('<tspan class="label s{}" dx="{}">● </tspan>{}').format(line.color, 14 if number else 0, line.label)
            for number, line in enumerate(lines)
        )
        parts.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(left + WIDTH, top + 15, labels))
    return Markup("").join(parts)
