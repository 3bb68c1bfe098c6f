"""Curves of several runs in one picture: a validation's accuracy (or another metric) over steps, a chart for each comparison.

    .venv/bin/python -m benchmarks.curves OUT.svg --chart "TITLE" label=RUN label=RUN ... [--chart ...] [--metric accuracy/validation]

RUN: a run's directory. The SVG stands alone, for an `<img>`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tasks.reporting.plots import charts_svg
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.views import COLORS, Chart, Series


def curves(charts: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], metric: str) -> str:
    """The picture.

    Args:
        charts: by title, by label: lines of a run's metrics.jsonl.

    Raises:
        ValueError: a run has no such metric, or a chart has more runs than the palette colours.
    """
    rows, drawn = list[dict[str, Any]](), list[Chart]()
    for title, runs in charts.items():
        if len(runs) > COLORS:
            raise ValueError(f"{title}: at most {COLORS} runs in a chart, not {len(runs)}")
        for label, lines in runs.items():
            points = [{"step": line["step"], f"{title}/{label}": line[metric]} for line in lines if metric in line]
            if not points:
                raise ValueError(f"{label}: no {metric} in its metrics")
            rows += points
        series = tuple(Series(label, f"{title}/{label}", color) for color, label in enumerate(runs, start=1))
        drawn.append(Chart(title, metric, series))
    return charts_svg(by_step(rows), drawn)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 written, 2 wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--chart", nargs="+", action="append", required=True, metavar=("TITLE", "label=RUN"))
    parser.add_argument("--metric", default="accuracy/validation")
    options = parser.parse_args(arguments)
    try:
        charts = {
            title: {label: read_lines(RunDirectory(Path(run)).metrics) for label, _, run in (pair.partition("=") for pair in pairs)}
            for title, *pairs in options.chart
        }
        options.out.write_text(curves(charts, options.metric))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
