"""What Ray adds to a train call: a compiled graph against plain actor calls, over the same workers, in one run.

    owner actor (as PolicyGroup is) ── PlainExecutor    ──► n workers        alternating blocks of calls on the same workers
                                    └─ CompiledExecutor ──► n workers        as it waits here; and `bare`, with Ray's own spinning reads

No-op workers return at once, so the call is all there is. Tiny-model workers run a real Megatron train step on a small batch that
each holds in memory, on the CPU (not on a machine with a GPU: the workers would share it). n workers are one replica (tensor
parallel for the tiny model); "2 replicas" is data parallelism.
`value` is the smaller of the no-op ratios (plain median / compiled median) at 1 and 2 workers.

    .venv/bin/python -m benchmarks.compiled_step [--calls 400] [--no-model]
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

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import ShardPlan, plan_batch
from actors.policy.executors import CompiledExecutor, PlainExecutor, Request
from configs.model import ModelConfig
from configs.policy import ParallelConfig, PolicyConfig

BLOCK = 50  # calls of one kind before the other kind's turn
SAMPLES, LENGTH = 8, 16


class NoOpWorker:
    """Returns what a worker would, without the work."""

    def execute(self, packed: bytes) -> bytes:
        """Return at once."""
        return Request.answer(packed, lambda _: {"loss": 0.0})

    def ping(self) -> None:
        """Return at once."""


class TinyWorker:
    """A Megatron worker whose batch lies in its own memory."""

    def __init__(self, parallel: ParallelConfig, model: str, rank: int) -> None:
        from actors.data_plane.in_memory import MemoryPlane
        from actors.policy.worker import PolicyWorker

        torch.set_num_threads(1)
        plane, meta = MemoryPlane(), batch()
        plane.register_partition("benchmark", fields=["input_ids", "token_mask", "sample_mask"])
        ids, mask = torch.arange(LENGTH) % 8, torch.arange(LENGTH) > 3
        plane.put(meta, {"input_ids": [ids] * SAMPLES, "token_mask": [mask] * SAMPLES, "sample_mask": [torch.tensor(1.0)] * SAMPLES})
        config = PolicyConfig(parallel=parallel, device="cpu", timeout_s=60)
        self._worker = PolicyWorker(config, model, rank, plane, seed=0, temperature=1.0)

    def setup(self, place: str) -> dict[str, Any]:
        """Join the others and build the model."""
        return self._worker.setup(place)

    def execute(self, packed: bytes) -> bytes:
        """A train step per plan."""
        return Request.answer(packed, lambda request: self._worker.train_steps(*request.arguments))

    def ping(self) -> None:
        """Return at once."""


class Owner:
    """Owns the graphs and takes the times, as PolicyGroup would."""

    def measure(self, replicas: list[list[Any]], plans: list[ShardPlan], calls: int) -> dict[str, float]:
        """Median and p95 microseconds of both paths, and the ratio of the medians."""
        named = [{f"worker-{r}-{i}": worker for i, worker in enumerate(workers)} for r, workers in enumerate(replicas)]
        compiled = CompiledExecutor(named, 60.0)
        executors: dict[str, PlainExecutor | CompiledExecutor] = {
            "plain": PlainExecutor(named, 60.0),
            "compiled": compiled,
            "bare": compiled,
        }
        requests = [Request("train_steps", ((plan,), "sft")) for plan in plans]
        times: dict[str, list[float]] = {name: [] for name in executors}
        for executor in executors.values():
            for _ in range(5):
                executor.run(requests)
        while len(times["compiled"]) < calls:
            for name, executor in executors.items():
                if name != "plain":
                    compiled.wait_by(spinning=compiled.spins or name == "bare")
                for _ in range(min(BLOCK, calls)):
                    started = time.perf_counter()
                    executor.run(requests)
                    times[name].append(time.perf_counter() - started)
        for executor in executors.values():
            executor.close()
        found = {f"{name}_{what}_us": round(value * 1e6, 1) for name in times for what, value in _quantiles(times[name]).items()}
        ratios = {kind: found["plain_median_us"] / found[f"{kind}_median_us"] for kind in ("compiled", "bare")}
        found |= {"ratio": round(ratios["compiled"], 2), "bare_ratio": round(ratios["bare"], 2)}
        return found | {"spins": float(compiled.spins), "to_bare": round(ratios["compiled"] / ratios["bare"], 2)}


def batch() -> KVBatchMeta:
    """Metadata of a small batch, as a rollout would give it."""
    return KVBatchMeta(
        partition_id="benchmark",
        task_name="train",
        keys=tuple(f"v0_p{row // 4}_g{row % 4}" for row in range(SAMPLES)),
        fields=frozenset({"input_ids", "token_mask", "sample_mask"}),
        sequence_lengths=(LENGTH,) * SAMPLES,
        tags=tuple({"response_length": LENGTH - 4, "reward": 1.0, "prompt_uid": str(row // 4)} for row in range(SAMPLES)),
    )


def main() -> None:
    """Run all layouts and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="calls of each kind with the no-op worker; a tenth of it with the model")
    parser.add_argument("--no-model", action="store_true", help="no-op workers only")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=32, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    detail: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        tiny = {} if options.no_model or torch.cuda.is_available() else start_models(Path(directory))
        remote: Any = ray.remote
        no_op = remote(num_cpus=0)(NoOpWorker)
        for name, replicas, ranks in (("1", 1, 1), ("2", 1, 2), ("4", 1, 4), ("2 replicas", 2, 1)):
            workers = [[no_op.remote() for _ in range(ranks)] for _ in range(replicas)]
            ray.get([worker.ping.remote() for row in workers for worker in row])
            detail[f"no-op, {name}"] = measure(workers, options.calls)
        for name, replicas_of_model in tiny.items():
            detail[f"tiny model, {name}"] = measure(replicas_of_model, max(options.calls // 10, 20))
        value = min(detail["no-op, 1"]["ratio"], detail["no-op, 2"]["ratio"])
        ray.shutdown()
    for name, row in detail.items():
        print(f"{name:>22}  " + "  ".join(f"{key} {figure}" for key, figure in row.items()))
    print(json.dumps({"name": "compiled_step", "value": value, "unit": "plain / compiled", "detail": detail}))


def measure(replicas: list[list[Any]], calls: int) -> dict[str, float]:
    """Times of one layout, taken by an actor that owns its graphs."""
    plans = plan_batch(batch(), PolicyConfig().batching, data_parallel=len(replicas)).shards
    remote: Any = ray.remote
    owner = remote(num_cpus=0)(Owner).remote()
    result: dict[str, float] = ray.get(owner.measure.remote(replicas, list(plans), calls), timeout=300)
    for actor in [owner, *(worker for row in replicas for worker in row)]:
        ray.kill(actor)
    return result


def start_models(directory: Path) -> dict[str, list[list[Any]]]:
    """Workers of every layout, all started at once."""
    from actors.models.scratch_model import write_scratch_model

    shape = ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    write_scratch_model(directory / "model", shape, ["3 + 4 = 7", "12 - 5 = 7"], seed=0)
    remote: Any = ray.remote
    actor = remote(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}})(TinyWorker)
    layouts, pending = {}, []
    for name, parallel in (("1", {}), ("2", {"tensor": 2}), ("4", {"tensor": 4}), ("2-replicas", {"data": 2})):
        layout = ParallelConfig(**parallel)
        workers = [actor.remote(layout, str(directory / "model"), rank) for rank in range(layout.world_size)]
        pending += [worker.setup.remote(f"file://{directory}/rendezvous-{name}") for worker in workers]
        layouts[name] = [workers[replica :: layout.data] for replica in range(layout.data)]
    ray.get(pending, timeout=300)
    return layouts


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "p95": statistics.quantiles(seconds, n=20)[-1]}


if __name__ == "__main__":
    main()
