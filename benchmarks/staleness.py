"""Does training on older samples cost steps? The sync recipe, and async with updates in flight at several ages, over several seeds.

    start  seed s ──► the warm-started model, from which all runs of the seed begin         one run per seed
    sync   seed s ──► final validation accuracy a(s) after S steps                          one run per seed
    async  seed s, age K ──► first step whose validation accuracy reaches a(s); ends there  one run per seed and age

An asynchronous run is one of 1.5 S steps: the learning rate of either recipe falls over the run's own steps.

The model of the start is shared since the recipes' own warm starts, with other numbers of threads, round differently: they ended at
accuracies between 0.33 and 0.38, and 50 steps apart.

Hours on a laptop (each run is a whole training), so it does one run after the other and keeps each result in `--results`: a second call
goes on where the first stopped, and prints the table from what is there. `--minutes` bounds a call, by default to the table alone; a run
that has begun is finished.

`value` is the worst ratio of async to sync steps over ages and seeds; null while runs are missing or one has not got there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import settings
from configs.loader import load

ROOT = Path(__file__).parent.parent
SYNC, ASYNC = "arithmetic-cpu", "arithmetic-cpu-async"
TARGET = 1.5  # times sync's steps: how long an async run is given


@dataclass(frozen=True)
class Case:
    """One run. An age of None is the sync recipe."""

    seed: int
    age: int | None

    @property
    def name(self) -> str:
        return f"sync-seed{self.seed}" if self.age is None else f"age{self.age}-seed{self.seed}"

    @property
    def start(self) -> str:
        return f"start-seed{self.seed}"

    def command(self, output: Path, steps: int) -> list[str]:
        extra = [f"model={{path: {output / self.start / 'hf'}}}", "warm_start={}", f"steps={steps}"]
        if self.age is not None:
            extra.append(f"asynchronous.max_trajectory_age_steps={self.age}")
        return self._command(SYNC if self.age is None else ASYNC, self.name, output, extra)

    def start_command(self, output: Path) -> list[str]:
        """The warm start, and one step at a learning rate that is lost in rounding."""
        return self._command(SYNC, self.start, output, ["steps=1", "policy.optimizer.lr=1.0e-15", "policy.optimizer.min_lr=0"])

    def _command(self, recipe: str, name: str, output: Path, extra: list[str]) -> list[str]:
        arguments = ["--recipe", recipe, f"seed={self.seed}", f"name={name}", f"output_dir={output}", *extra]
        return [sys.executable, "-m", "flows.grpo", *arguments]


def run(case: Case, output: Path, steps: int, enough: float | None) -> dict[str, Any]:
    """Train up to `steps` steps, or until the validation accuracy is `enough`; the seed's start before that, if it has not run.

    Raises:
        RuntimeError: a run failed.
    """
    if not (output / case.start / "hf").is_dir():  # written last
        watch(case.start, case.start_command(output), output, None)
    return watch(case.name, case.command(output, steps), output, enough)


def watch(name: str, arguments: list[str], output: Path, enough: float | None) -> dict[str, Any]:
    """One run, until the validation accuracy is `enough`."""
    directory = output / name
    shutil.rmtree(directory, ignore_errors=True)  # of a call that was interrupted
    output.mkdir(parents=True, exist_ok=True)
    log = output / f"{name}.log"
    environment = settings.child_environment(PREFECT_HOME=str(output / f"prefect-{name}"), PREFECT_API_URL="", RAY_ADDRESS="")
    began, stopped = time.monotonic(), False
    with (
        log.open("wb") as file,
        subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT) as command,
    ):
        try:
            while command.poll() is None:
                time.sleep(2)
                if enough is not None and not stopped and reached(curve(directory, "accuracy/validation"), enough) is not None:
                    command.terminate()  # and not an interrupt, which children of a background shell ignore
                    stopped = True
        finally:
            command.terminate()  # this command was ended: so is its run
    if command.returncode != 0 and not stopped:
        raise RuntimeError(f"{name} failed; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}")
    ages = curve(directory, "staleness/mean").values()
    return {
        "accuracy": curve(directory, "accuracy/validation"),
        "mean_age": round(sum(ages) / len(ages), 2) if ages else 0.0,
        "seconds": round(time.monotonic() - began),
    }


def curve(directory: Path, name: str) -> dict[int, float]:
    """A metric by step, as far as the run has come."""
    from tasks.reporting.jsonl import read_lines
    from tasks.reporting.metrics import by_step, series

    path = directory / "metrics.jsonl"
    return dict(series(by_step(read_lines(path)), name)) if path.is_file() else {}


def reached(accuracy: Mapping[Any, float], wanted: float) -> int | None:
    """The first step whose validation accuracy is at least `wanted`; or None."""
    return next((int(step) for step, value in accuracy.items() if value >= wanted), None)


def final(accuracy: Mapping[Any, float]) -> float:
    """Of the last step."""
    return accuracy[max(accuracy, key=int)]


def table(results: dict[str, Any], seeds: list[int], ages: list[int], steps: int) -> tuple[list[str], list[float | None]]:
    """Markdown rows, and the ratio of each async run (None: missing, or not reached)."""
    lines = ["| seed | sync, accuracy | " + " | ".join(f"age {age}: step (ratio), mean age" for age in ages) + " |"]
    lines.append("|---|---|" + "---|" * len(ages))
    ratios: list[float | None] = []
    for seed in seeds:
        base = results.get(Case(seed, None).name)
        cells = [f"{final(base['accuracy']):.3f} at step {steps}" if base else "not run"]
        for age in ages:
            found = results.get(Case(seed, age).name)
            step = reached(found["accuracy"], final(base["accuracy"])) if found and base else None
            ratios.append(step / steps if step is not None else None)
            if not found or not base:
                cells.append("not run")
            elif step is None:
                cells.append(f"not reached: at most {max(found['accuracy'].values()):.3f}, {found['mean_age']:.1f}")
            else:
                cells.append(f"{step} ({step / steps:.2f}), {found['mean_age']:.1f}")
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    return lines, ratios


def main() -> None:
    """Run what is missing and print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/staleness.json"))
    parser.add_argument("--minutes", type=float, default=0.0, help="no run begins after this many; 0: only the table of what was run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run ends too
    began = time.monotonic()
    steps = load(SYNC).steps
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.is_file() else {}
    cases = [Case(seed, age) for seed in options.seeds for age in (None, *options.ages)]
    for case in cases:
        if case.name in results or time.monotonic() - began > 60 * options.minutes:
            continue
        print(f"{case.name} ...", flush=True)
        base = results.get(Case(case.seed, None).name)
        enough = final(base["accuracy"]) if base and case.age is not None else None
        given = steps if case.age is None else round(TARGET * steps)
        results[case.name] = run(case, options.results.parent.absolute() / "staleness", given, enough)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1))
    lines, ratios = table(results, options.seeds, options.ages, steps)
    print("\n".join(lines))
    value = None if None in ratios else round(max(ratio for ratio in ratios if ratio is not None), 3)
    detail = {"runs": sum(case.name in results for case in cases), "of": len(cases), "results": results}
    print(json.dumps({"name": "staleness", "value": value, "unit": "optimizer steps, async / sync", "detail": detail}))


if __name__ == "__main__":
    main()
