"""Everything that docs/gpu.md reports, one command after the other, on a machine with one GPU or two. Behind `make gpu-check`.

    jobs that check     several at a time on each GPU: tests, whole runs (their accuracies count, not their seconds)
    jobs that measure   after those, one at a time: benchmarks. With several GPUs those for one GPU run side by side, each on its own

Each job is a process (a CUDA fault ends one alone) with a log, OUT/NAME.log, and what it found goes to OUT/gpu_check.json: the command,
its exit status, seconds, and the last line that it printed (a benchmark's JSON). Machines may be lent for minutes: name jobs to run only
these, and show several calls' results as one table with `--table OUT/*.json`.

    python -m benchmarks.gpu_check [JOB ...] [--out DIR] [--per-gpu N] [--seconds S] | --list | --table FILE ...
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks import precision_runs
from configs import settings

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Job:
    """A command of Python's, what it needs, and how long it may take."""

    arguments: tuple[str, ...]
    gpus: int = 1
    alone: bool = True
    limit_s: float = 400

    @property
    def command(self) -> str:
        return "python " + " ".join(f"'{word}'" if " " in word else word for word in self.arguments)


def checks(file: str, only: str = "", gpus: int = 1, alone: bool = False) -> Job:
    """Some tests of tests/gpu."""
    return Job(("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{file}.py", *(("-k", only) if only else ())), gpus, alone, 500)


def measures(module: str, *arguments: str, gpus: int = 1, alone: bool = True, limit_s: float = 400) -> Job:
    """A benchmark."""
    return Job(("-m", f"benchmarks.{module}", *arguments), gpus, alone, limit_s)


def trains(recipe: str, *overrides: str, gpus: int = 1, alone: bool = False) -> Job:
    """A run of a recipe."""
    return Job(("-m", "flows.grpo", "--recipe", recipe, *overrides), gpus, alone, 900)


def kills(recipe: str, calm: str, killed: str, *overrides: str) -> Job:
    """A run whose engine and trainer are killed, beside the same run left alone; each on the GPUs that it is given."""
    saves = ("checkpoint.every_steps=5", "checkpoint.inputs=true")
    return Job(("-m", "tests.chaos.accuracy", "--recipe", recipe, "--gpus", calm, killed, *saves, *overrides), 2, True, 580)


STEP = ("train_step", "--tokens", "256", "512", "1024", "2048", "4096", "--lengths", "256", "1024", "4096")
JOBS: dict[str, Job] = {
    "logprob": checks("test_logprob"),
    "policy": checks("test_policy"),
    **{
        f"graphs-{name}": checks("test_cuda_graphs", name)
        for name in ("dense", "padded", "dynamic", "packed", "move", "supervised", "each_loss")
    },
    **{f"refit-{name}": checks("test_refit", name) for name in ("ipc-async", "tied-llama", "sleep-1", "sleep-2", "lost")},
    "refit-memory": checks("test_refit", "memory and not nccl", alone=True),  # it looks at the memory of the whole GPU
    "checkpoint-devices": checks("test_checkpoint"),
    "smollm2": trains("smollm2-135m-1gpu"),
    "train_step-0.5b": measures(*STEP),
    "train_step-smollm2": measures(*STEP, "--shape", "smollm2-135m"),
    "train_step-ray": measures("train_step", "--ray", "--tokens", "512", "2048", "--lengths", "256", "--modes", "packed"),
    "checkpoint": measures("checkpoint"),
    "grpo_step": measures("grpo_step"),
    "rollout": measures("rollout"),
    "precision": measures("precision", "--recipe", "smollm2-135m-1gpu", "--prompts", "8", "--tokens", "32", alone=False),
    **{f"learning-{name}": measures("precision_runs", name, alone=False, limit_s=580) for name in precision_runs.VARIANTS},
    "memory-workers": measures("memory", "workers", limit_s=600),
    "memory-runs": measures("memory", "runs", limit_s=600),
    "refit-0.5b": measures("refit", "--shapes", "0.5b", "--modes", "ipc"),
    "refit-1.5b": measures("refit", "--shapes", "1.5b", "--modes", "ipc", "--sleep-levels", "1"),
    "layouts": checks("test_layouts", gpus=2),
    "two-nodes": checks("test_nodes", gpus=2, alone=True),
    "memory-two-gpus": measures("memory", "two-gpus", gpus=2, limit_s=600),
    "refit-two-gpus": checks("test_refit", "(nccl and not memory) or two-gpus", gpus=2),
    "refit-memory-nccl": checks("test_refit", "memory-nccl", gpus=2, alone=True),
    "refit-nccl-0.5b": measures("refit", "--shapes", "0.5b", "--modes", "nccl", gpus=2),
    "refit-nccl-1.5b": measures("refit", "--shapes", "1.5b", "--modes", "nccl", gpus=2),
    "smollm2-sync": trains("smollm2-135m-2gpu-async", "name=smollm2-135m-2gpu-sync", "mode=sync", gpus=2, alone=True),
    "smollm2-async": trains("smollm2-135m-2gpu-async", gpus=2, alone=True),
    "kills": kills("smollm2-135m-1gpu", "0", "1", "steps=45", "generation.enforce_eager=true"),
    "kills-async": kills("smollm2-135m-2gpu-async", "0,1", "0,1", "steps=45", "generation.enforce_eager=true"),
}


def run(name: str, job: Job, out: Path, gpu: str | None) -> dict[str, Any]:
    """One job, to its end or its limit; on one GPU alone, if that is named."""
    began, log = time.monotonic(), out / f"{name}.log"
    environment = settings.child_environment(PREFECT_HOME=str(out / f"prefect-{name}"), PREFECT_API_URL="", RAY_ADDRESS="")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    print(f"{name}: {job.command}", flush=True)
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, *job.arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(job.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the session that was started above
            status = -1
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    result = {"job": name, "command": job.command, "status": status, "seconds": round(time.monotonic() - began), "last": found(lines)}
    print(f"{name}: exit {status} after {result['seconds']} s: {str(result['last'])[:300]}", flush=True)
    return result


def found(lines: list[str]) -> Any:
    """What a job says at its end: a benchmark's JSON, else its last line."""
    for line in reversed(lines):
        if line.startswith('{"name"'):
            return json.loads(line)
    return lines[-1]


def visible(gpus: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU."""
    named = settings.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(gpus)]


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown: what ran, and what it said."""
    rows = ["| job | command | exit | s | result |", "|---|---|---|---|---|"]
    for result in results:
        last = result["last"]
        said = f"{last['value']} {last['unit']}" if isinstance(last, dict) else last
        rows.append(f"| {result['job']} | `{result['command']}` | {result['status']} | {result['seconds']} | {said} |")
    return rows


def main() -> int:
    """Run the jobs that were named, or all that this machine has the GPUs for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", choices=[[], *JOBS])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"))
    parser.add_argument("--per-gpu", type=int, default=4, help="checks that share a GPU: a run of SmolLM2 holds 13 to 19 GiB")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no job begins after these")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these results and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:20} {job.gpus} GPU  {job.command}" for name, job in JOBS.items()))
        return 0
    if options.table:
        print("\n".join(table([row for file in options.table for row in json.loads(file.read_text())])))
        return 0
    gpus, began = torch.cuda.device_count(), time.monotonic()
    if gpus == 0:
        print("error: there is no GPU here")
        return 1
    chosen = {name: JOBS[name] for name in options.jobs} or {name: job for name, job in JOBS.items() if job.gpus <= gpus}
    if missing := [name for name, job in chosen.items() if job.gpus > gpus]:
        print(f"error: {missing[0]} needs {chosen[missing[0]].gpus} GPUs, and there are {gpus}")
        return 1
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []

    def start(item: tuple[str, Job], places: SimpleQueue[str] | None = None) -> None:
        if time.monotonic() - began > options.seconds:
            print(f"{item[0]}: not run, {options.seconds:g} s are over", flush=True)
            return
        gpu = places.get() if places else None
        try:
            results.append(run(*item, out, gpu))
        finally:
            if places and gpu is not None:
                places.put(gpu)
        (out / "gpu_check.json").write_text(json.dumps(results, indent=1))

    for alone, at_once in ((False, options.per_gpu), (True, 1)):
        places: SimpleQueue[str] = SimpleQueue()
        for gpu in visible(gpus) * at_once:
            places.put(gpu)
        items = [item for item in chosen.items() if item[1].alone is alone]
        with ThreadPoolExecutor(gpus * at_once) as pool:
            list(pool.map(partial(start, places=places), [item for item in items if item[1].gpus == 1]))
        for item in items:
            if item[1].gpus > 1:
                start(item)
    print("\n".join(table(results)))
    return int(any(result["status"] for result in results) or len(results) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
