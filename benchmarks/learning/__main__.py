"""Steps to a reward, final accuracy and seconds of a recipe under several presets and seeds, with paired 95 % intervals.

The recipe's warm start is made once and kept as OUT/start/hf; every run begins there, in a process of its own, one at a time and niced,
and adds a line to OUT/rows.jsonl. The same command again goes on where it stopped; what is there already is not run again. A recipe
without a warm start begins at its own model.

Differences are of the same seed against the first preset; their interval is Student's t over the seeds (none with one seed).
`value` is the highest mean accuracy of a preset.

    .venv/bin/python -m benchmarks.learning                      # two presets, one seed, three steps; in pieces of a minute
    .venv/bin/python -m benchmarks.learning --full               # all presets, two seeds, 100 steps: the table of docs/algorithms.md
    .venv/bin/python -m benchmarks.learning --full --seconds 500 # begins no run that would not end within these, by those before it
    python -m benchmarks.learning --recipe smollm2-135m-1gpu --presets grpo cispo --seeds 0 1 --steps 100 [field=value ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.children import FailedError, device, run
from benchmarks.learning.results import Plan, Row, pairs_table, reward_metric, runs_table, summary
from configs.base import ConfigError
from configs.loader import load, preset_names
from configs.run import RunConfig
from flows.service.server import prefect_server
from tasks.reporting.jsonl import LinesWriter, read_lines
from tasks.reporting.run_dir import RunDirectory

BASE = "grpo"  # first where presets are not named
# A run is made whole or not at all: nothing is kept to go on from.
ONCE = ("checkpoint.every_steps=null", "checkpoint.keep_best=false", "checkpoint.inputs=false")
OF_START = ("model", "environment", "warm_start", "seed")  # fields that decide what the warm start comes to


def plans(options: argparse.Namespace, start: str) -> list[Plan]:
    """All rows of the table: seed by seed, so that what is there early can be paired."""
    overrides = tuple(options.overrides)
    return [
        Plan(recipe=options.recipe, preset=preset, seed=seed, steps=options.steps, start=start, overrides=overrides)
        for seed in options.seeds
        for preset in options.presets
    ]


def check(options: argparse.Namespace) -> RunConfig:
    """Load the configuration of every run, before minutes go into the first. Returns that of the recipe.

    Raises:
        ConfigError: one does not fit.
    """
    for preset in options.presets:
        load(options.recipe, [*options.overrides, f"preset={preset}", f"steps={options.steps}"])
    return load(options.recipe, options.overrides)


def make_start(out: Path, recipe: str, overrides: Sequence[str]) -> float:
    """The recipe's warm start, into OUT/start. Returns its seconds.

    Raises:
        FailedError.
    """
    shutil.rmtree(out / "start", ignore_errors=True)  # of one that was broken off
    words = ("-m", "benchmarks.learning.start", "--recipe", recipe, *overrides, *ONCE, "name=start", f"output_dir={out}")
    seconds = run(words, out / "start.log", nice=True)
    print(f"the warm start took {seconds:.0f} s", flush=True)
    return seconds


def check_start(out: Path, config: RunConfig) -> None:
    """The warm start that is there is this recipe's.

    Raises:
        ConfigError: it was made with other settings.
    """
    made = load(str(RunDirectory(out / "start").config))
    if others := [name for name in OF_START if getattr(made, name) != getattr(config, name)]:
        raise ConfigError(f"{out / 'start'} was made with another {others[0]}: give another --out, or remove it")


def digest(weights: Path | None) -> str:
    """Of the weights in a directory; empty without one."""
    found = hashlib.sha256()
    for file in sorted(weights.glob("*.safetensors")) if weights else ():
        found.update(file.read_bytes())
    return found.hexdigest()[:12] if weights else ""


def train(plan: Plan, weights: Path | None, out: Path) -> Row:
    """One run, from its start to its end.

    Raises:
        FailedError.
    """
    name = f"{plan.preset}-{plan.seed}"
    shutil.rmtree(out / "runs" / name, ignore_errors=True)  # of a run that was broken off
    begins = (f"model={{path: {json.dumps(str(weights))}}}", "warm_start={steps: 0}") if weights else ()
    fields = (f"seed={plan.seed}", f"steps={plan.steps}", f"validate_every={plan.steps}", f"name={name}", f"output_dir={out / 'runs'}")
    words = ("-m", "flows.grpo", "--recipe", plan.recipe, *plan.overrides, f"preset={plan.preset}", *begins, *fields, *ONCE)
    wall_s = run(words, out / f"{name}.log", nice=True)
    directory = RunDirectory(out / "runs" / name)
    return Row.of(plan, directory, wall_s, device(), reward_metric(load(str(directory.config))))


def rewarded() -> list[str]:
    """The presets that learn from rewards alone, `BASE` first: no teacher is needed."""
    names = [BASE, *(name for name in preset_names() if name != BASE)]
    return [name for name in names if load("arithmetic-cpu", [f"preset={name}"]).policy.loss.policy_gradient_coef]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `--full` stands for those of the whole table, where others are not named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="arithmetic-cpu")
    parser.add_argument("--full", action="store_true", help="all presets that learn from rewards, seeds 0 and 1, 100 steps")
    parser.add_argument("--presets", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--reach", type=float, default=0.7, help="the reward whose first step is reported")
    parser.add_argument("--seconds", type=float, help="begin no run that would end later than this; default: 60 in a first look, else none")
    parser.add_argument("--out", type=Path, help="default: runs/learning/RECIPE")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="of the recipe, for all runs")
    options = parser.parse_intermixed_args(arguments)
    if options.seconds is None:
        options.seconds = float("inf") if options.full or options.steps else 60.0
    presets, seeds, steps = (rewarded(), [0, 1], 100) if options.full else ([BASE, "cispo"], [0], 3)
    options.presets, options.seeds = options.presets or presets, options.seeds or seeds
    options.steps = options.steps or steps
    options.began = time.monotonic()
    options.out = (options.out or Path("runs/learning") / Path(options.recipe).stem).resolve()
    return options


def work(options: argparse.Namespace) -> tuple[list[Row], int, int]:
    """Make the rows that are missing. Returns all that are there now, in the order of the table, how many it has, and how many failed.

    Raises:
        ConfigError: see `check`, `check_start`. FailedError: the warm start did not end well.
    """
    out, config, failed = options.out, check(options), 0
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "rows.jsonl"
    rows = {row.plan: row for row in map(Row.model_validate, read_lines(lines) if lines.exists() else ())}
    weights = RunDirectory(out / "start").hf if config.warm_start.steps else None
    made = weights is None or weights.is_dir()  # an export is renamed into its place when it is whole
    if made and weights is not None:
        check_start(out, config)
    if not made or any(plan not in rows for plan in plans(options, digest(weights))):
        with prefect_server():  # one for all of them
            longest = 0.0 if made else make_start(out, options.recipe, options.overrides)
            failed = make_rows(options, weights, rows, longest)
    planned = plans(options, digest(weights))
    return [rows[plan] for plan in planned if plan in rows], len(planned), failed


def make_rows(options: argparse.Namespace, weights: Path | None, rows: dict[Plan, Row], longest: float) -> int:
    """Run what `rows` lacks, and add it. Returns how many runs failed. Args: longest: seconds that a run is expected to take at least."""
    failed, longest = 0, max(longest, *(row.wall_s for row in rows.values() if row.plan.steps == options.steps), 0.0)
    for plan in plans(options, digest(weights)):
        if plan in rows:
            continue
        if time.monotonic() - options.began + longest > options.seconds:
            print(f"{options.seconds:g} s are nearly over: the same command goes on", flush=True)
            break
        try:
            row = rows[plan] = train(plan, weights, options.out)
        except FailedError as error:
            failed += 1
            print(f"{plan.preset}, seed {plan.seed}: {error}", flush=True)
            continue
        longest = max(longest, row.wall_s)
        with LinesWriter(options.out / "rows.jsonl") as file:
            file.append(row.model_dump(mode="json"))
        print(f"{plan.preset}, seed {plan.seed}: accuracy {row.after[0]:.3f}; {row.wall_s:.0f} s, {row.seconds:.0f} of steps", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the tables and the JSON line. Returns the exit code: 0 done or to be gone on with, 1 a run failed, 2 wrong input."""
    options = parse(arguments)
    try:
        rows, planned, failed = work(options)
    except (ConfigError, FailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    tables = [runs_table(rows, options.reach), pairs_table(rows, options.presets[0], options.reach)]
    print("\n" + "\n\n".join("\n".join(table) for table in tables if table))
    found = summary(rows, options.reach)
    value = max((of["accuracy"] for of in found.values()), default=None)
    detail = {"recipe": options.recipe, "steps": options.steps, "rows": len(rows), "planned": planned, "failed": failed, "presets": found}
    print(json.dumps({"name": "learning", "value": value, "unit": "accuracy", "detail": detail}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
