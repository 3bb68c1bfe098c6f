"""How long it takes to bring the policy's weights into vLLM on GPUs. Random weights of Qwen2-0.5B's and -1.5B's shape, bfloat16.

ipc    one GPU: an engine and a policy worker share it. The engine sleeps before each refit (`--sleep-levels`; 0: it does not), and
       the refit wakes it: `refit` is a call to the policy group, from the request to the engine's leave to generate.
nccl   two GPUs: an engine generates `REQUESTS` responses while weights are sent, in flight, one refit after the other; `pause` is the time
       for which the running requests stand still, as the engine measures it. Every response must come, at its full length.

Before each refit the weights are changed, and after the last one the engine's greedy tokens must be (nearly) the likeliest under the
policy's weights: a forward pass of transformers says so. GB/s: bytes of the weights over `refit` (ipc) or `pause` (nccl).
`value` is seconds for the first shape and mode that ran: `refit` of ipc at the first sleep level, else `pause` of nccl.

    .venv/bin/python -m benchmarks.refit [--shapes 0.5b 1.5b] [--sleep-levels 1 2 0] [--rounds 7] [--modes ipc nccl] [field=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors import names
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult, UpdateOptions
from benchmarks import gpu_run
from configs.loader import load

CONTEXT, REQUESTS, LENGTH = 2048, 200, 1500
OVERRIDES = [
    "name=refit", "warm_start.steps=0", "warm_start.stop_at_accuracy=null",
    "policy.dtype=bfloat16", "policy.timeout_s=300", "policy.batching.micro_batch_size=8",
    "generation.dtype=bfloat16", "generation.executor=async", "generation.enforce_eager=false", "generation.max_num_seqs=256",
    "generation.kv_cache_gib=8", f"generation.max_model_len={CONTEXT}", "generation.timeout_s=400", "environment.validation_size=8",
    "policy.compiled_graph.warmup_seq_len=128",
]  # fmt: skip


class Bench:
    """A run's engine and policy worker."""

    def __init__(self, model: str, engines: list[str]) -> None:
        self.model, self.engines = model, engines
        self.pool = EnginePool(gpu_run.NAMESPACE, engines, timeout_s=300)
        self._worker = ray.get_actor("policy-worker-0", namespace=gpu_run.NAMESPACE)
        self._group = ray.get_actor(names.POLICY, namespace=gpu_run.NAMESPACE)

    def refit(self, options: UpdateOptions) -> dict[str, float]:
        """Change the weights, and bring them into the engine."""
        ray.get(self._worker.__ray_call__.remote(disturb), timeout=60)
        ray.get(self._group.__ray_call__.remote(next_version), timeout=60)
        result: dict[str, float] = gpu_run.ask(names.POLICY, "refit", self.engines, options)
        return result

    def check(self) -> None:
        """The engine says what transformers says with the policy's weights."""
        prompt = list(range(5, 37))
        (answer,) = self.pool.generate([GenerationRequest("check", prompt, 32, 0.0, 1.0, 0)])
        weights: Any = ray.get(self._worker.call.remote("export_weights"), timeout=120)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model)).float().eval()
            model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
            model.tie_weights()
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        worst = float((logits.max(-1).values - chosen).max())
        spread = float(logits.std(-1).mean())  # a token picked by other weights would lie several of these below
        assert worst < 0.5 * spread, f"a greedy token lies {worst:.3f} below the likeliest; the logits' spread is {spread:.3f}"
        del model
        torch.cuda.empty_cache()


def disturb(actor: Any) -> None:
    """Slightly other weights, in a policy worker."""
    with torch.no_grad():
        for parameter in actor._worker._bare.parameters():
            parameter.mul_(1.01)


def next_version(group: Any) -> None:
    """As a training step would: responses tell one version from the next."""
    group._version += 1


def colocated(bench: Bench, sleeps: bool, rounds: int) -> dict[str, Any]:
    """Refits of an idle engine, asleep or not. The first two, which connect and compile, do not count."""
    rows = []
    for _ in range(rounds + 2):
        if sleeps:
            bench.pool.sleep()
        rows.append(bench.refit(UpdateOptions()))
    bench.check()
    return figures([row["refit_s"] for row in rows[2:]], rows[-1]["bytes"])


def in_flight(bench: Bench, rounds: int) -> dict[str, Any]:
    """Refits under running requests."""
    options = UpdateOptions("in_flight", recompute_kv_cache=False)
    bench.refit(options)  # connects
    requests = [GenerationRequest(str(row), [7 + row % 90] * 16, LENGTH, 1.0, 1.0, row) for row in range(REQUESTS)]
    bench.pool.submit(requests)
    time.sleep(1.0)
    rows = [bench.refit(options) for _ in range(rounds)]
    running = sum(health.running_requests for health in bench.pool.health().values())
    assert running == REQUESTS, f"{REQUESTS - running} responses ended before the last refit: they are too short to measure it"
    results: list[GenerationResult] = []
    deadline = time.monotonic() + 300
    while len(results) < REQUESTS and time.monotonic() < deadline:
        results += bench.pool.collect(1.0)
    assert sorted(int(result.request_id) for result in results) == list(range(REQUESTS))
    assert {len(result.token_ids) for result in results} == {LENGTH}
    versions = {len(result.weight_segments) for result in results}
    assert versions == {rounds + 1}, f"responses met {versions} weight versions"
    bench.check()
    return figures([row["pause_s"] for row in rows], rows[-1]["bytes"]) | {"refit_s": statistics.median(row["refit_s"] for row in rows)}


def figures(seconds: list[float], size: float) -> dict[str, Any]:
    """Median, worst, each in its order, and rate at the median."""
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 4),
        "worst_s": round(max(seconds), 4),
        "all_s": [round(value, 3) for value in seconds],
        "gb_per_s": round(size / median / 1e9, 2),
        "gb": round(size / 1e9, 3),
    }


def measure(shape: str, overrides: list[str], sleep_level: int, rounds: int, mode: str) -> dict[str, Any]:
    """One run's actors, and its refits."""
    placed = [f"generation.sleep_level={sleep_level}", f"placement={'colocated' if mode == 'ipc' else 'separate'}"]
    config = load("arithmetic-cpu", [*OVERRIDES, *placed, *overrides])
    with tempfile.TemporaryDirectory() as directory:
        model = gpu_run.write_model(Path(directory), shape, CONTEXT)
        with gpu_run.running(config, model) as actors:
            gpu_run.never_end(actors.engines)
            bench = Bench(model, actors.engines)
            return colocated(bench, sleep_level > 0, rounds) if mode == "ipc" else in_flight(bench, rounds)


def main() -> None:
    """Measure and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=gpu_run.SHAPES, default=["0.5b", "1.5b"])
    parser.add_argument("--modes", nargs="+", choices=["ipc", "nccl"], default=["nccl" if torch.cuda.device_count() > 1 else "ipc"])
    parser.add_argument("--sleep-levels", type=int, nargs="+", choices=[0, 1, 2], default=[1, 2, 0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for shape in options.shapes:
        for mode in options.modes:
            for level in options.sleep_levels if mode == "ipc" else [0]:
                name = f"{shape} {mode}" + (f" sleep {level}" if mode == "ipc" else "")
                found[name] = measure(shape, options.overrides, level, options.rounds, mode)
                print(name, json.dumps(found[name]), flush=True)
    first = next(iter(found.values()))
    print(json.dumps({"name": "refit", "value": first["seconds"], "unit": "s", "detail": found}))


if __name__ == "__main__":
    main()
