"""PolicyGroup: one actor that owns all Megatron workers of a run, and the only one that calls them.

    task ──train(meta)──► PolicyGroup ──plan of rank r──► worker 0 .. worker N-1   (one process per GPU)
                              │                                │ columns
                              └── plan_batch(meta), metadata └──── get/put ────► data plane

The actor runs one call at a time, so stages never overlap on a worker.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Literal

import ray

from actors.data_plane.connect import DataPlaneAddress, connect
from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import ShardPlan, plan_batch
from actors.generation.pool import EnginePool
from actors.policy.flops import training_flops
from actors.waiting import wait_all
from configs.policy import OptimizerConfig, PolicyConfig

Objective = Literal["sft", "grpo"]


class PolicyWorkerActor:
    """`PolicyWorker` with methods that Ray can inspect; wrapped by `ray.remote` when the group is built."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: str,
        rank: int,
        init_method: str,
        address: DataPlaneAddress,
        timeout_s: float,
        seed: int,
        temperature: float,
    ) -> None:
        from actors.policy.worker import PolicyWorker  # Megatron: imported in the worker's process only

        plane = connect(address, timeout_s=timeout_s)
        self._worker = PolicyWorker(config, model_path, rank, init_method, plane, seed, temperature)

    def setup(self) -> dict[str, Any]:
        return self._worker.setup()

    def train(self, plan: ShardPlan, objective: Objective) -> dict[str, float]:
        return self._worker.train(plan, objective)

    def logprob(self, plan: ShardPlan, column: str, reference: bool) -> dict[str, float]:
        return self._worker.logprob(plan, column, reference)

    def snapshot_reference(self) -> None:
        self._worker.snapshot_reference()

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        self._worker.reset_optimizer(optimizer)

    def export_weights(self) -> Any:
        return self._worker.export_weights()

    def save_hf(self, path: str) -> None:
        self._worker.save_hf(path)


class PolicyGroup:
    """Wrapped by `ray.remote` where the run starts its actors. Every method is one stage of a step."""

    def __init__(
        self,
        config: PolicyConfig,
        model_path: str,
        namespace: str,
        address: DataPlaneAddress,
        timeout_s: float,
        seed: int,
        temperature: float,
        worker_options: dict[str, Any],
    ) -> None:
        self._config, self._namespace = config, namespace
        self._version = 0
        self._model_path = model_path
        init_method = f"tcp://127.0.0.1:{_free_port()}"
        remote = ray.remote(PolicyWorkerActor)
        self._workers = [
            remote.options(name=f"policy-worker-{rank}", namespace=namespace, **worker_options).remote(
                config, model_path, rank, init_method, address, timeout_s, seed, temperature
            )
            for rank in range(config.parallel.world_size)
        ]

    def ready(self) -> str:
        """Build the model on every worker. A line for the log."""
        info = self._on_all("setup")[0]
        return f"{len(self._workers)} worker(s) on {info['device']}, {info['parameters']:,} parameters, {info['optimizer']}"

    def train(self, meta: KVBatchMeta, objective: Objective) -> dict[str, float]:
        """`updates_per_step` optimizer steps (one for sft) over the batch. Returns means over them (maxima of `/max`), tokens, FLOP rate.

        Raises:
            ValueError: a batch that does not divide. ActorGoneError, ActorTimeoutError: a worker is lost.
        """
        started = time.monotonic()
        updates = self._config.updates_per_step if objective == "grpo" else 1
        size = len(meta) // updates
        history = []
        for update in range(updates):
            part = meta.slice(update * size, (update + 1) * size) if updates > 1 else meta
            history.append(self._over_shards("train", part, objective))
        if objective == "grpo":
            self._version += 1
        metrics = {
            name: max(h[name] for h in history) if name.endswith("/max") else sum(h[name] for h in history) / updates for name in history[0]
        }
        seconds = time.monotonic() - started
        flops = training_flops(self._model_path, meta.sequence_lengths)
        metrics |= {
            "tokens": float(sum(meta.sequence_lengths)),
            "train_s": seconds,
            "tflops_per_worker": flops / seconds / 1e12 / len(self._workers),
        }
        return metrics

    def logprob(self, meta: KVBatchMeta, column: str, reference: bool = False) -> dict[str, float]:
        """Write the log-probabilities of the current (or reference) weights as `column`. Returns timings."""
        started = time.monotonic()
        self._over_shards("logprob", meta, column, reference)
        return {"logprob_s": time.monotonic() - started}

    def snapshot_reference(self) -> None:
        """Make the current weights the reference policy."""
        self._on_all("snapshot_reference")

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Fresh moments and schedule."""
        self._on_all("reset_optimizer", optimizer)

    def refit(self, engines: list[str]) -> dict[str, float]:
        """Give the current weights to the engines. Returns the weight version, seconds and bytes.

        Raises:
            ActorGoneError, ActorTimeoutError: a worker or an engine is lost; the message names it.
        """
        started = time.monotonic()
        refs = {f"policy-worker-{rank}": worker.export_weights.remote() for rank, worker in enumerate(self._workers)}
        # Only readiness is awaited: the tensors stay in the object store, and each engine maps them there.
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._config.timeout_s)
        weights = refs["policy-worker-0"]
        others = {name: ref for name, ref in refs.items() if name != "policy-worker-0"}
        wait_all(others, what="refit: export", timeout_s=self._config.timeout_s)
        exported = time.monotonic()
        taken = EnginePool(self._namespace, engines, timeout_s=self._config.timeout_s).refit(weights, self._version)
        return {
            "weight_version": self._version,
            "refit_s": time.monotonic() - started,
            "export_s": exported - started,
            "bytes": float(max(taken.values())),
        }

    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face directory."""
        self._on_all("save_hf", path)

    def _over_shards(self, method: str, meta: KVBatchMeta, *arguments: Any) -> dict[str, float]:
        parallel = self._config.parallel
        plan = plan_batch(meta, self._config.batching, data_parallel=parallel.data, align=8 * parallel.tensor * parallel.context)
        refs = {
            f"policy-worker-{rank}": getattr(worker, method).remote(plan.shards[self._data_rank(rank)], *arguments)
            for rank, worker in enumerate(self._workers)
        }
        return wait_all(refs, what=method, timeout_s=self._config.timeout_s)["policy-worker-0"]

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        refs = {f"policy-worker-{rank}": getattr(worker, method).remote(*arguments) for rank, worker in enumerate(self._workers)}
        return list(wait_all(refs, what=method, timeout_s=self._config.timeout_s).values())

    def _data_rank(self, rank: int) -> int:
        # Megatron's default order "tp-cp-ep-dp-pp": tensor fastest, then context, then data, pipeline slowest.
        parallel = self._config.parallel
        return rank // (parallel.tensor * parallel.context) % parallel.data


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
