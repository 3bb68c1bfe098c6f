"""Planned against measured memory of a GPU (actors/models/memory_plan.py), over real starts and steps with random weights of real shapes.

  worker   a policy worker alone on a GPU: it starts, and takes steps over micro-batches of the largest size, as in benchmarks.train_step
  run      a run's actors, as in benchmarks.grpo_step: start, rollouts, reference log-probabilities, updates, refits

Each configuration is a process of its own, with a limit; on a machine with several GPUs those for one run side by side. Measured is what
the driver says is in use, all processes together, above what was in use before: its peak in each phase, 20 looks a second. A phase
begins with what the one before has left, so the largest peaks are compared, of the phases that were measured. One that fails is a
row with its error. `value` is the worst relative error in percent, of the configurations that ran.

    .venv/bin/python -m benchmarks.memory [NAME or workers, runs, two-gpus ...] [--out DIR] [--seconds S]
                                          | --list | --refusals | --table FILE ...
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
import torch

from actors import names
from actors.data_plane.connect import connect
from actors.data_plane.in_memory import MemoryPlane
from actors.generation.types import UpdateOptions
from actors.models import memory_plan
from actors.models.memory_parts import GIB
from actors.policy.worker import PolicyWorker
from benchmarks import gpu_check, gpu_run, train_step
from benchmarks.memory_cases import CASES, GROUPS, Case, planned, plans, refusals
from configs.run import RunConfig

STEPS, LIMIT_S = 3, 240.0


@dataclass
class Watch:
    """Measured peaks by phase, above what was in use at first, and what else was to be seen."""

    memory: gpu_run.Memory
    before: dict[str, float]
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    seen: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls) -> Watch:
        """On GPUs that nothing of ours uses yet."""
        memory = gpu_run.Memory()
        time.sleep(1.0)
        return cls(memory, memory.peaks_gib())

    def end_of(self, phase: str, **seen: Any) -> None:
        """The phase has ended; it may come again."""
        time.sleep(0.15)
        now, peaks, known = self.memory.now_gib(), self.memory.peaks_gib(), self.phases.setdefault(phase, {})
        for gpu, peak in peaks.items():
            known[gpu] = round(max(known.get(gpu, 0.0), peak - self.before.get(gpu, 0.0)), 2)
        self.seen.append({"phase": phase, "now": now, "peaks": peaks, "processes": processes(), **seen})
        print(f"{phase}: {self.seen[-1]}", flush=True)  # a process that is ended at its limit leaves this much

    def found(self) -> dict[str, Any]:
        """For the row."""
        self.memory.close()
        return {"measured": self.phases, "before": self.before, "seen": self.seen}


def processes() -> dict[str, float]:
    """GiB by process id and GPU, where the driver says so."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        rows = [[word.strip() for word in line.split(",")] for line in lines]
        return {f"{pid} {gpu[-4:]}": round(float(used) / 1024, 2) for gpu, pid, used in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def torch_holds() -> dict[str, float]:
    """GiB of this process: allocated and reserved now, and at most."""
    cuda = torch.cuda
    if not cuda.is_available():
        return {}
    sizes = {
        "allocated": cuda.memory_allocated(), "reserved": cuda.memory_reserved(),
        "most_allocated": cuda.max_memory_allocated(), "most_reserved": cuda.max_memory_reserved(),
    }  # fmt: skip
    return {name: round(size / GIB, 2) for name, size in sizes.items()}


def worker(case: Case, directory: Path, watch: Watch) -> None:
    """A worker of this process."""
    model = train_step.write_model(directory / "model", case.shape, case.length, torch.cuda.is_available())
    torch.cuda.empty_cache()
    config, plane = case.config().policy, MemoryPlane()
    watch.memory.peaks_gib()
    one = PolicyWorker(config, str(model), 0, plane, seed=0, temperature=1.0)
    one.setup(f"file://{directory}/rendezvous")
    watch.end_of("start", torch=torch_holds())
    if config.why_no_ref_logprob() is None:
        one.snapshot_reference()
    shard = train_step.batch(plane, case, "memory").shards[0]
    graphs = config.cuda_graph.warmup_steps if config.cuda_graph.impl != "none" else 0
    for _ in range(STEPS):
        if config.why_no_ref_logprob() is None:
            one.logprob(shard, "warm_up_logprobs", True)
            watch.end_of("logprob", torch=torch_holds())
        metrics = one.train(shard, "grpo")
        watch.end_of("train", torch=torch_holds(), graphs=graphs, metrics={k: v for k, v in metrics.items() if "/" in k})
    one.close()


def run(case: Case, model: str, watch: Watch) -> None:
    """A run's actors."""
    config = case.config()
    with gpu_run.running(config, model) as actors:
        watch.end_of("start", torch=_of_workers(config, torch_holds))
        gpu_run.never_end(actors.engines)
        gpu_run.ask(names.POLICY, "snapshot_reference")
        gpu_run.ask(names.COLLECTOR, "begin_generating")
        plane = connect(actors.address, timeout_s=120)
        for number in range(STEPS):
            claim, _ = gpu_run.rollout(number, config.rollout.prompts_per_step)
            watch.end_of("rollout")
            gpu_run.ask(names.POLICY, "logprob", claim.meta, "reference_logprobs", True)
            watch.end_of("logprob", torch=_of_workers(config, torch_holds))
            meta = claim.meta.with_fields("reference_logprobs")
            meta = plane.put(meta, {"advantages": [torch.randn(()) for _ in range(len(meta))]})
            metrics = gpu_run.ask(names.POLICY, "train", meta, "grpo")
            watch.end_of("train", torch=_of_workers(config, torch_holds), metrics={k: v for k, v in metrics.items() if "/" in k})
            gpu_run.ask(names.POLICY, "refit", actors.engines, UpdateOptions())
            watch.end_of("refit", torch=_of_workers(config, torch_holds))
            gpu_run.ask(names.LEDGER, "trained", claim.uids)


def _of_workers(config: RunConfig, look: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
    def inside(_: Any) -> dict[str, float]:
        return look()

    workers = [ray.get_actor(f"policy-worker-{rank}", namespace=gpu_run.NAMESPACE) for rank in range(config.policy.parallel.world_size)]
    found: list[dict[str, float]] = ray.get([one.__ray_call__.remote(inside) for one in workers], timeout=60)
    return found


def measure(name: str) -> dict[str, Any]:
    """One configuration, in this process; what went wrong is in `error`."""
    case = CASES[name]
    row: dict[str, Any] = {"name": name, "planned": planned(case)}
    alone, began = case.group == GROUPS[0], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        # Writing it gives this process a context, which counts as the worker's, but is none of a run's.
        model = "" if alone else gpu_run.write_model(Path(directory), case.shape, max(2048, case.length))
        watch = Watch.begin()
        try:
            if alone:
                worker(case, Path(directory), watch)
            else:
                run(case, model, watch)
        except Exception as error:  # noqa: BLE001  (a row says so)
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    return row | watch.found() | {"seconds": round(time.monotonic() - began), "gpu": _gpu_name()}


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """The row with both peaks (GiB), of the kind of GPU that holds most, and their ratio; of the phases that were measured."""
    if row.get("error") or not any(row.get("measured", {}).values()):
        return row | {"error": row.get("error") or "nothing was measured"}
    measured = max(peak for phase in row["measured"].values() for peak in phase.values())
    plan = max(size for kind in row["planned"].values() for phase, size in kind.items() if phase in _comparable(row))
    return row | {"peak_planned": plan, "peak_measured": measured, "ratio": round(plan / measured, 3)}


def _comparable(row: dict[str, Any]) -> set[str]:
    return set(row["measured"]) | ({"warm-up", "save"} if "rollout" in row["measured"] else set())


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = ["| configuration | phase of the peak | planned GiB | measured GiB | planned / measured |", "|---|---|---|---|---|"]
    for row in rows:
        if "ratio" not in row:
            lines.append(f"| {row['name']} | {row['error']} | | | |")
            continue
        peaks = {phase: max(gpus.values(), default=0.0) for phase, gpus in row["measured"].items()}
        phase = max(peaks, key=lambda name: peaks[name])
        lines.append(f"| {row['name']} | {phase} | {row['peak_planned']:.1f} | {row['peak_measured']:.1f} | {row['ratio']:.2f} |")
    return lines


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the JSON line says."""
    errors = {row["name"]: round(100 * abs(row["ratio"] - 1), 1) for row in rows if "ratio" in row}
    failed = [row["name"] for row in rows if "ratio" not in row]
    detail = {row["name"]: {key: row.get(key) for key in ("gpu", "planned", "measured", "error", "seconds")} for row in rows}
    return {
        "name": "memory", "value": max(errors.values(), default=None), "unit": "% of the measured peak, at worst",
        "configurations": len(errors), "failed": failed, "errors": errors, "detail": detail,
    }  # fmt: skip


def measured_apart(chosen: Sequence[str], out: Path, seconds: float) -> list[dict[str, Any]]:
    """Each in a process of its own: those for two GPUs one after the other, then those for one, as many at once as there are GPUs."""
    began, free = time.monotonic(), SimpleQueue[str]()
    gpus = gpu_check.visible(max(1, torch.cuda.device_count()))
    for gpu in gpus:
        free.put(gpu)

    def one(name: str, gpu: str) -> dict[str, Any]:
        left = seconds - (time.monotonic() - began)
        if left < 20:
            return {"name": name, "error": f"not run: {seconds:g} s are over"}
        job = gpu_check.Job(("-m", "benchmarks.memory", "--one", name), limit_s=min(LIMIT_S, left))
        result = gpu_check.run(name, job, out, gpu)
        last = result["last"]
        row = last if isinstance(last, dict) else {"name": name, "error": f"exit {result['status']}: {last}"[:300]}
        (out / f"{name}.json").write_text(json.dumps(row, indent=1))
        return row

    def alone(name: str) -> dict[str, Any]:
        gpu = free.get()
        try:
            return one(name, gpu)
        finally:
            free.put(gpu)

    rows = {name: one(name, ",".join(gpus[:2])) for name in chosen if CASES[name].gpus > 1}
    rest = [name for name in chosen if name not in rows]
    with ThreadPoolExecutor(len(gpus)) as pool:
        rows |= dict(zip(rest, pool.map(alone, rest), strict=True))
    return [rows[name] for name in chosen]


def main() -> None:
    """Measure the chosen configurations and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES, *GROUPS], help="default: all that this machine has the GPUs for")
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--seconds", type=float, default=540.0, help="for all; a configuration that would begin later is left out")
    parser.add_argument("--list", action="store_true", help="print the configurations and their plans, and end")
    parser.add_argument("--refusals", action="store_true", help="print configurations that are refused, with the advice, and end")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files (--out DIR/NAME.json) and end")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    if options.refusals:
        print("\n".join(refusals()))
        return
    gpus = torch.cuda.device_count()
    chosen = [name for name, case in CASES.items() if {name, case.group} & set(options.names) or (not options.names and case.gpus <= gpus)]
    if options.list:
        print("\n".join(f"{name}\n{memory_plan.render(plans(CASES[name]))}" for name in chosen or CASES))
        return
    if options.table:
        rows = [compared(json.loads(file.read_text())) for file in options.table]
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        rows = [compared(row) for row in measured_apart(chosen, options.out.resolve(), options.seconds)]
    print("\n".join(table(rows)))
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
