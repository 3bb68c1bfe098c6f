"""The report of a run: one HTML file that needs nothing else, written from the other files of the run directory.

    summary.json, metrics.jsonl, samples.jsonl, slowest.jsonl, config.yaml
      └─► write_report ──► report.html   (opens from file://, light and dark; report.js: zoom, and samples with a filter)

It can be written again at any time: while the run goes on, and for one that failed before its first step.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from configs.validation import OWN_SET
from tasks.reporting import text
from tasks.reporting.charts import Line, line_chart, stacked_bars
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import Row, by_step, series
from tasks.reporting.rewards import reward_charts, reward_table
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.slowest import failures, outcome, slowest_first
from tasks.reporting.summary import SetAccuracy, Summary
from tasks.reporting.validation import set_tables, with_sets
from tasks.reporting.views import VIEWS, Chart, View

_TEMPLATE, _SCRIPT = "report.html.j2", "report.js"
_MOST_SAMPLES, _NEWEST = 600, 300  # in the page; above the first the older ones are thinned
_SAMPLE_KEYS = (
    "step", "phase", "prompt", "response", "answer", "reward", "rewards", "outcome", "error", "tokens", "truncated", "source", "uid",
)  # fmt: skip
_TRAINING_STEPS_SHOWN = 5
_MOST_WARNINGS = 10
_DATA_PLANE = ("count", "errors", "rows", "bytes", "p50_s", "p99_s")


@dataclass(frozen=True)
class Panel:
    """A chart with its heading and, for more than one series, (style class, label) pairs of its legend."""

    title: str
    note: str
    chart: Markup
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tile:
    """A headline number; a wide one may show what it was before."""

    value: str
    label: str
    before: str | None = None


def write_report(directory: RunDirectory, summary: Summary | None = None) -> Path:
    """Write report.html, in one piece. Files other than summary.json may be missing: a run that failed early has none.

    Args:
        summary: of a run that goes on, which has no summary.json yet.

    Raises:
        FileNotFoundError: no summary.json.
        ValueError: a damaged file; the message names it.
    """
    page = render_report(
        summary or Summary.read(directory.summary),
        read_lines(directory.metrics) if directory.metrics.exists() else [],
        read_lines(directory.samples) if directory.samples.exists() else [],
        directory.config.read_text(encoding="utf-8") if directory.config.exists() else "",
        read_lines(directory.slowest) if directory.slowest.exists() else [],
    )
    # Lone surrogates, which a broken token may leave in a response, have no UTF-8.
    fresh = directory.report.with_name(f".{directory.report.name}")
    fresh.write_text(page, encoding="utf-8", errors="replace")
    fresh.replace(directory.report)
    return directory.report


def render_report(
    summary: Summary, metrics: Sequence[Row], samples: Sequence[dict[str, Any]], config: str, slowest: Sequence[dict[str, Any]] = ()
) -> str:
    """The page. `metrics`, `samples` and `slowest` are lines as read back; `config` is shown as it is."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"number": text.number, "score": text.score, "duration": text.duration, "share": text.share, "outcome": outcome}
    environment.filters |= filters
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    rows, view = by_step(metrics), VIEWS[summary.flow]
    more = [chart for chart in view.more if any(value for one in chart.series for _, value in series(rows, one.metric))]
    charts = [*with_sets(view.charts, rows), *more]
    of_rewards = reward_charts(rows) if view.charts else []  # a flow without charts has no steps to draw them over
    script = (Path(__file__).parent / _SCRIPT).read_text(encoding="utf-8")
    warnings = [f"step {row['step']}: {name} was not finite" for row in metrics for name, value in row.items() if value is None]
    return environment.get_template(_TEMPLATE).render(
        summary=summary,
        view=view,
        tiles=_tiles(summary),
        panels=_panels(charts, rows),
        time_panel=_time_panel(rows, view),
        stages=_stage_table(summary),
        rewards=reward_table(rows),
        reward_panels=_panels(of_rewards, rows),
        slowest=slowest_first(slowest),
        failures=failures(slowest),
        sets=set_tables(rows, {name: one.gain for name, one in summary.sets.items()}),
        set_headings=_set_headings(summary),
        data_plane=_data_plane_table(rows),
        compared=_compared(samples),
        headings=_headings(summary, samples),
        training=_training_samples(samples),
        warnings=warnings[:_MOST_WARNINGS],
        more_warnings=len(warnings) - len(warnings[:_MOST_WARNINGS]),
        config=config,
        data=_data([*charts, *of_rewards], rows, samples) | {"running": summary.status == "running"},
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _data(charts: Sequence[Chart], rows: Sequence[Row], samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the page's script draws and filters."""
    shown = samples if len(samples) <= _MOST_SAMPLES else [*_spread(samples[:-_NEWEST], _MOST_SAMPLES - _NEWEST), *samples[-_NEWEST:]]
    return {
        "steps": [row["step"] for row in rows],
        "charts": [
            {
                "bounds": chart.bounds,
                "log": chart.log,
                "lines": [
                    {"label": one.label, "color": one.color, "values": [_rounded(row.get(one.metric)) for row in rows]}
                    for one in chart.series
                ],
            }
            for chart in charts
        ],
        "samples": [{key: _finalize(sample[key]) for key in _SAMPLE_KEYS if key in sample} for sample in shown],
        "left_out": len(samples) - len(shown),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _spread(samples: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [samples[index * len(samples) // count] for index in range(count)]


def _finalize(value: Any) -> Any:
    """What stands in the page as text; markup of ours (charts) is of another type."""
    return text.visible(value) if type(value) is str else value


def _data_plane_table(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """(operation, its numbers since the start) as the last step saw them."""
    seen = next((row for row in reversed(rows) if any(name.startswith("data_plane/") for name in row)), {})
    operations = [name.split("/")[1] for name in seen if name.startswith("data_plane/") and name.endswith("/count")]
    return [(one, {name: seen.get(f"data_plane/{one}/{name}") for name in _DATA_PLANE}) for one in sorted(operations)]


def _tiles(summary: Summary) -> list[Tile]:
    """The first two are wide."""
    score, number = text.score, text.number
    if summary.flow == "evaluate":
        alone = summary.accuracy_before is None
        of = "of the model" if alone else "baseline → model"
        accuracy, reward = (None, None) if alone else (score(summary.accuracy_before), score(summary.reward_before))
        return [
            Tile(score(summary.accuracy_after), f"accuracy, {of}{_intervals(summary)}", accuracy),
            Tile(score(summary.reward_after), f"reward, {of}", reward),
            Tile(text.duration(summary.seconds), "wall clock"),
        ]
    if summary.flow == "sft":
        best = f"validation loss of the best checkpoint (step {number(summary.best_step)})"
        first = [
            Tile(number(summary.validation_loss_after), "validation loss, before → after", number(summary.validation_loss_before)),
            Tile(number(summary.validation_loss_best), best),
        ]
        last = [
            Tile(number(summary.mean_tflops_per_worker), "TFLOP/s per worker"),
            Tile((summary.stopped_because or text.ABSENT).replace("_", " "), "stopped by"),
        ]
    else:
        first = [
            Tile(
                score(summary.accuracy_after), f"validation accuracy, before → after{_intervals(summary)}", score(summary.accuracy_before)
            ),
            Tile(score(summary.reward_after), "validation reward, before → after", score(summary.reward_before)),
        ]
        last = [
            Tile(number(summary.mean_logprob_error), "mean log-probability error"),
            Tile(number(summary.weight_version), "last weight version"),
        ]
    return [
        *first,
        Tile(str(summary.steps), f"{VIEWS[summary.flow].title} steps"),
        Tile(text.duration(summary.seconds), "wall clock"),
        Tile(number(summary.tokens), "tokens trained on"),
        Tile(number(summary.tokens_per_s), "tokens per second"),
        *last,
    ]


def _intervals(summary: Summary) -> str:
    own = summary.sets.get(OWN_SET, SetAccuracy())
    shown = [text.interval(one[1], one[2]) for one in (own.before, own.after) if one]
    return f" ·{' →'.join(shown)}" if shown else ""


def _set_headings(summary: Summary) -> tuple[str, str]:
    if summary.flow == "evaluate":
        return ("model", "") if summary.accuracy_before is None else ("baseline", "model")
    return "before", "after"


def _panels(charts: Sequence[Chart], rows: Sequence[Row]) -> list[Panel]:
    steps = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 0)
    panels = []
    for chart in charts:
        lines = [Line(one.label, series(rows, one.metric), one.color) for one in chart.series]
        legend = tuple((f"s{line.color}", line.label) for line in lines if line.points) if len(lines) > 1 else ()
        title = f"{chart.title}: {chart.note}, over steps"
        drawn = line_chart(lines, title=title, steps=steps, bounds=chart.bounds, log=chart.log)
        panels.append(Panel(chart.title, chart.note, drawn, legend))
    return panels


def _time_panel(rows: Sequence[Row], view: View) -> Panel:
    timed = [row for row in rows if row.get("time/step") is not None]
    known = [stage for stage in (*view.stages, *view.outside) if any(f"time/{stage}" in row for row in timed)]
    classes = {stage: f"s{number}" for number, stage in enumerate(known, start=1)} | {"other": "other"}
    stages = {stage: [float(row.get(f"time/{stage}") or 0.0) for row in timed] for stage in known}
    inside = [sum(stages[stage][i] for stage in known if stage in view.stages) for i in range(len(timed))]
    # Clearing, metrics and Prefect's own time: what the stages of a step do not explain.
    stages["other"] = [max(0.0, float(row["time/step"]) - explained) for row, explained in zip(timed, inside, strict=True)]
    stages = {stage: seconds for stage, seconds in stages.items() if any(seconds)}
    title, note = "Time per step", f"seconds per stage; on top of the step: {', '.join(view.outside)}"
    chart = stacked_bars([int(row["step"]) for row in timed], stages, classes, title=f"{title}: {note}")
    return Panel(title, note, chart, tuple((classes[stage], stage) for stage in stages))


def _stage_table(summary: Summary) -> list[tuple[str, float, float]]:
    """(stage, seconds, share of the run), longest first; the last row is the rest of the wall clock."""
    stages = sorted(summary.seconds_per_stage.items(), key=lambda item: (-item[1], item[0]))
    rest = summary.seconds - sum(seconds for _, seconds in stages)
    if rest > 0:
        stages.append(("other", rest))
    return [(stage, seconds, seconds / summary.seconds if summary.seconds > 0 else 0.0) for stage, seconds in stages]


def _compared(samples: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """(before, after) of each validation prompt; after is the latest validation, None when there was no second one."""
    before = [sample for sample in samples if sample["phase"] == "before"]
    later = [sample for sample in samples if sample["phase"] in ("validation", "after")]
    last = max((sample["step"] for sample in later), default=None)
    # By problem, not by position; one that occurs twice is paired in order.
    waiting: dict[tuple[str, str, str], deque[dict[str, Any]]] = defaultdict(deque)
    for sample in later:
        if sample["step"] == last:
            waiting[_problem(sample)].append(sample)
    pairs = []
    for sample in before:
        matches = waiting[_problem(sample)]
        pairs.append((sample, matches.popleft() if matches else None))
    return pairs


def _problem(sample: dict[str, Any]) -> tuple[str, str, str]:
    return sample.get("uid", ""), sample["prompt"], sample["answer"]  # runs of old have no uid


def _headings(summary: Summary, samples: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """Of the section with compared samples, and of its two columns."""
    if summary.flow == "evaluate":
        return "Answers", *_set_headings(summary)
    before = [sample["step"] for sample in samples if sample["phase"] == "before"]
    later = [sample["step"] for sample in samples if sample["phase"] in ("validation", "after")]
    names = f"before (step {min(before, default=0)})", f"after (step {max(later)})" if later else "after"
    return "The same validation prompts, before and after", *names


def _training_samples(samples: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """(step, samples) of a few training steps, first to last, evenly spaced."""
    grouped: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        if sample["phase"] == "train":
            grouped[sample["step"]].append(sample)
    steps = sorted(grouped)
    count = min(len(steps), _TRAINING_STEPS_SHOWN)
    chosen = sorted({steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)})
    return [(step, grouped[step]) for step in chosen]
