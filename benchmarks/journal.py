"""What the journal of the ledger's transitions costs: a recipe is run, and the lines of its journal are written once more, against a clock.

`value` is the part of a step's time that the journal's writes take, in percent: at most 1. `detail`: lines and milliseconds a step,
microseconds a line (hash, JSON, write; a cut's sync to the disk in `cut_ms`), seconds of a step.

    .venv/bin/python -m benchmarks.journal [--recipe arithmetic-cpu] [--steps 8]
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from configs import settings

settings.apply_defaults()

from actors.rollout.journal import Cut, Journal, Line, parse  # noqa: E402  (after the settings: they are read at import)
from tasks.reporting.jsonl import read_lines  # noqa: E402

_REPEATS = 5


def main() -> None:
    """Run, write, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic-cpu")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        where = [f"output_dir={home}", f"steps={options.steps}", "warm_start.steps=10", "warm_start.check_every=10", "validate_every=1000"]
        command = [sys.executable, "-m", "flows.grpo", "--recipe", options.recipe, "checkpoint.every_steps=1", *where]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        run = Path(home) / "latest"
        steps = [row["time/step"] for row in read_lines(run / "metrics.jsonl") if "time/step" in row]
        lines = parse((run / "journal.jsonl").read_bytes()).lines
        found = min((write(lines, Path(home) / f"journal-{number}.jsonl") for number in range(_REPEATS)), key=lambda one: one["write_s"])
    step_s = sum(steps) / len(steps)
    detail: dict[str, Any] = {
        "recipe": options.recipe,
        "step_s": round(step_s, 3),
        "lines_per_step": round(len(lines) / len(steps), 1),
        "ms_per_step": round(found["write_s"] / len(steps) * 1e3, 3),
        "us_per_line": round(found["write_s"] / len(lines) * 1e6, 1),
        "cut_ms": round(found["cut_s"] / len(steps) * 1e3, 2),
    }
    value = 100 * found["write_s"] / len(steps) / step_s
    print(json.dumps({"name": "journal", "value": round(value, 3), "unit": "% of a step", "detail": detail}))


def write(lines: tuple[Line, ...], path: Path) -> dict[str, float]:
    """Seconds of writing the lines, in the batches in which they came; and of the cuts."""
    seconds = {"write_s": 0.0, "cut_s": 0.0}
    journal = Journal.open(path)
    for (_, is_cut), batch in itertools.groupby(lines, key=lambda line: (line.time, isinstance(line.record, Cut))):
        records = [line.record for line in batch]
        started = time.perf_counter()
        if is_cut:
            for cut in records:
                assert isinstance(cut, Cut)
                journal.cut(cut.step, cut.checkpoint, cut.version)
        else:
            journal.append(*records)
        seconds["cut_s" if is_cut else "write_s"] += time.perf_counter() - started
    journal.close()
    return seconds


if __name__ == "__main__":
    main()
