"""TRL's GRPO and this project's on the same GPU, in turns: seconds of a step at two sizes, and learning sums.

  step      benchmarks.grpo_step with one engine, with three, and TRL, each in a process of its own; the next turn in the opposite order.
            A size counts once one lease of a machine has all its turns. Random weights of SmolLM2-135M's shape, full length, KL term.
  learning  recipe smollm2-135m-1gpu and TRL on the same prompts in the same order, from the same weights, paired by seed.

Each job adds a line to OUT/results.jsonl; the same command goes on where it stopped. On a machine that is lent for minutes, bring what
earlier leases found with --have. Learning runs count whichever lease they are from; their seconds are not compared.
`value` is the smallest TRL / ours over turns and sizes with one engine.

    .venv/bin/pip install trl==1.16.0
    .venv/bin/python -m benchmarks.peers [step] [learning] [--out DIR] [--have FILE ...] [--seconds S] [--sides ours trl]
    .venv/bin/python -m benchmarks.peers --table FILE ...      # print the tables of these results, run nothing
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import children, grpo_step
from benchmarks.gpu_check import found
from benchmarks.learning.results import Plan, Row, reward_metric
from benchmarks.peers.jobs import Job, Result, Weights, complete_lease, learning_jobs, missing, step_jobs
from benchmarks.peers.results import learning_pairs, learning_table, ratios, settings_lines, step_table
from benchmarks.peers.trl_side import RECIPE, learning_overrides, recipe
from configs.base import ConfigError
from tasks.reporting.jsonl import LinesWriter, read_lines
from tasks.reporting.run_dir import RunDirectory

LEARNING = "32x16x32"
LONGEST_S = 550.0  # of a job
ONCE = ("checkpoint.every_steps=null", "checkpoint.keep_best=false", "checkpoint.inputs=false")


def write_weights(job: Job, folder: Path) -> str:
    """The directory that the job's model is in, in Hugging Face format; made where there is none yet."""
    directory = folder / job.weights
    if not (directory / "config.json").exists():
        code = ("-m", "benchmarks.peers.weights", job.weights, str(directory))
        children.run(code, folder / f"{job.weights}.log", limit_s=LONGEST_S)
    return str(directory)


def run_trl(job: Job, out: Path) -> dict[str, Any]:
    """TRL's side. Returns the fields of a `Result`."""
    model, log, written = write_weights(job, out / "weights"), out / f"{job.name}.log", out / f"{job.name}.json"
    written.write_text(job.model_dump_json())
    wall_s = children.run(("-m", "benchmarks.peers.trl_side", str(written), model), log, limit_s=LONGEST_S)
    last = dict(found(log.read_text(errors="replace").strip().splitlines()))
    del last["name"]
    return last | {"rest_s": round(wall_s - sum(last["steps_s"]), 1)}


def run_ours(job: Job, out: Path) -> dict[str, Any]:
    """This project's side, by its own commands. Returns the fields of a `Result`."""
    log = out / f"{job.name}.log"
    if job.part == "step":
        words = ["-m", "benchmarks.grpo_step", *f"--sizes {job.size} --engines {job.engines} --steps {job.steps}".split()]
        children.run(words, log, limit_s=LONGEST_S)
        row = found(log.read_text(errors="replace").strip().splitlines())["detail"][job.size]
        return {"steps_s": row["steps_s"], "peak_gib": row["peak_gib"], "settings": {"command": shlex.join(["python", *words])}}
    model = write_weights(job, out / "weights")
    place = (f"model={{path: {json.dumps(model)}}}", f"name={job.name}", f"output_dir={out / 'runs'}")
    words = ["-m", "flows.grpo", "--recipe", RECIPE, *learning_overrides(job), *place, *ONCE]
    wall_s = children.run(words, log, limit_s=LONGEST_S)
    plan = Plan(recipe=RECIPE, preset="", seed=job.seed, steps=job.steps, start=job.weights)
    directory = newest(out / "runs", job.name)
    row, seconds = Row.of(plan, directory, wall_s, "", reward_metric(recipe(job))), step_seconds(directory)
    return {
        "steps_s": seconds, "rewards": row.rewards, "before": row.before, "after": row.after,
        "rest_s": round(wall_s - sum(seconds), 1), "settings": {"command": shlex.join(["python", *words])},
    }  # fmt: skip


def newest(folder: Path, name: str) -> RunDirectory:
    """Of a run that was begun more than once, the directory of the last."""
    tries = [path for path in folder.iterdir() if path.name == name or path.name.removeprefix(f"{name}-").isdigit()]
    return RunDirectory(max(tries, key=lambda path: int(path.name.removeprefix(name).removeprefix("-") or 1)))


def step_seconds(directory: RunDirectory) -> list[float]:
    """Of each step of a run."""
    return [round(row["time/step"], 3) for row in read_lines(directory.metrics) if "time/step" in row]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], "step", "learning"], help="default: both")
    parser.add_argument("--sizes", nargs="+", default=list(grpo_step.SIZES), help="of `step`: prompts x responses x tokens")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of `step`, after the warm-up")
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"], choices=["ours", "trl"], help="of `learning`: one in each process")
    parser.add_argument("--learning-steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job after these")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--have", type=Path, nargs="+", default=[], help="results.jsonl of earlier leases")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of these results and end")
    return parser.parse_intermixed_args(arguments)


def planned(options: argparse.Namespace) -> list[Job]:
    """All jobs, in order."""
    parts, weights = options.parts or ["step", "learning"], list[Weights](options.weights)
    steps = step_jobs(options.sizes, options.turns, options.steps) if "step" in parts else []
    learning = learning_jobs(LEARNING, weights, options.seeds, options.learning_steps) if "learning" in parts else []
    return steps + [job for job in learning if job.side in options.sides]


def read_results(files: Sequence[Path]) -> list[Result]:
    """Of all these files that are there."""
    return [Result.model_validate(row) for file in files if file.exists() for row in read_lines(file)]


def why_not() -> str | None:
    """What is missing on this machine, in one line."""
    if importlib.util.find_spec("trl") is None:
        return "TRL is not installed: pip install trl==1.16.0 (the extra `peers`), or put an unpacked one on PYTHONPATH"
    if children.device().startswith("CPU"):
        return "there is no GPU here"
    return None


def work(options: argparse.Namespace, jobs: Sequence[Job]) -> tuple[list[Result], int]:
    """Run what is missing. Returns all results, and how many jobs failed."""
    began, out, failed = time.monotonic(), options.out.resolve(), 0
    (out / "weights").mkdir(parents=True, exist_ok=True)
    lines, lease, device = out / "results.jsonl", children.lease(), children.device()
    results = read_results([*options.have, lines])
    left = missing(jobs, results, lease)
    print(f"{device}, lease {lease}: {len(left)} of {len(jobs)} jobs to do", flush=True)
    for job in left:
        if time.monotonic() - began > options.seconds:
            print(f"{options.seconds:g} s are over: the same command goes on", flush=True)
            break
        try:
            fields = (run_trl if job.side == "trl" else run_ours)(job, out)
        except children.FailedError as error:
            failed += 1
            print(f"{job.name}: {error}", flush=True)
            continue
        result = Result(job=job, lease=lease, device=device, **fields)
        results.append(result)
        with LinesWriter(lines) as file:
            file.append(result.model_dump(mode="json"))
        print(f"{job.name}: {sum(result.steps_s) / len(result.steps_s):.2f} s a step", flush=True)
    return results, failed


def show(jobs: Sequence[Job], results: Sequence[Result], failed: int) -> None:
    """The tables and the JSON line."""
    tables = [step_table(jobs, results), learning_table(results), learning_pairs(results), settings_lines(results)]
    print("\n" + "\n\n".join("\n".join(table) for table in tables if table))
    found_ratios: dict[str, list[float]] = {}
    for size in dict.fromkeys(job.size for job in jobs if job.part == "step"):
        if (lease := complete_lease(jobs, results, size)) is not None:
            of = [one for one in results if one.job.part == "step" and one.job.size == size and one.lease == lease]
            ours = [one for one in of if one.job.side == "ours" and one.job.engines == 1]
            found_ratios[size] = [round(ratio, 3) for ratio in ratios(ours, [one for one in of if one.job.side == "trl"])]
    value = min((ratio for of_size in found_ratios.values() for ratio in of_size), default=None)
    detail = {"ratios": found_ratios, "results": len(results), "planned": len(jobs), "failed": failed}
    print(json.dumps({"name": "peers", "value": value, "unit": "TRL's seconds a step / ours, one engine", "detail": detail}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done or to be gone on with, 1 a job failed, 2 it cannot run here."""
    options = parse(arguments)
    jobs = planned(options)
    if options.table:
        show(jobs, read_results(options.table), 0)
        return 0
    if why := why_not():
        print(f"error: {why}", file=sys.stderr)
        return 2
    try:
        results, failed = work(options, jobs)
    except (ConfigError, children.FailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(jobs, results, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
