"""The Ray side of an engine: methods that Ray can inspect, around a plain `Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from actors.generation.engine import Engine
from actors.generation.types import EngineHealth, GenerationRequest, GenerationResult, UpdateMode, WeightUpdate
from actors.heap import freeze_heap
from configs.rollout import GenerationConfig

COLLECTORS = 16  # threads of an engine actor in which clients wait for results; a further one queues until another's wait ends


class EngineActor:
    """`Engine` with methods that Ray can inspect.

    One `generate` at a time; beside it `submit` and `abort` (in order), up to `COLLECTORS` waiting `collect`, one update, and `health`.
    """

    def __init__(self, config: GenerationConfig, model_path: str, seed: int, eos_token_ids: Sequence[int]) -> None:
        self._engine = Engine(config, model_path, seed, eos_token_ids)

    def ready(self) -> str:
        """Start the engine. A line for the log."""
        started = self._engine.start()
        freeze_heap()
        return started

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        return self._engine.generate(requests)

    @ray.method(concurrency_group="submit")
    def submit(self, client: str, requests: Sequence[GenerationRequest]) -> None:
        self._engine.submit(client, requests)

    @ray.method(concurrency_group="submit")
    def abort(self, client: str, request_ids: Sequence[str]) -> list[str]:
        return self._engine.abort(client, request_ids)

    @ray.method(concurrency_group="collect")
    def collect(self, client: str, timeout_s: float) -> list[GenerationResult]:
        return self._engine.collect(client, timeout_s)

    @ray.method(concurrency_group="update")
    def sleep(self) -> None:
        self._engine.sleep()

    @ray.method(concurrency_group="update")
    def join_transfer(self, init_info: dict[str, Any]) -> None:
        self._engine.join_transfer(init_info)

    @ray.method(concurrency_group="feed")
    def feed(self, transfer_id: str, info: dict[str, Any]) -> None:
        self._engine.feed(transfer_id, info)

    @ray.method(concurrency_group="health")
    def abandon_transfer(self, transfer_id: str, reason: str) -> None:
        self._engine.abandon_transfer(transfer_id, reason)

    @ray.method(concurrency_group="update")
    def update_weights(self, offered: Any, version: int, mode: UpdateMode = "wait", recompute_kv_cache: bool = True) -> WeightUpdate:
        """A reference to weights in host memory: Ray resolves it here, from the host's object store."""
        return self._engine.update_weights(offered, version, mode, recompute_kv_cache)

    @ray.method(concurrency_group="health")
    def health(self) -> EngineHealth:
        return self._engine.health()

    def shutdown(self) -> None:
        self._engine.shutdown()


def engine_actor_class(cls: type[EngineActor] = EngineActor) -> Any:
    """`EngineActor` for Ray: `.options(name=..., namespace=..., num_cpus=..., num_gpus=...).remote(config, model_path, seed, eos_ids)`.

    On a CPU give OMP_WAIT_POLICY=passive in the options' runtime_env (OpenMP reads it before any code of ours runs): on cores that
    other actors use too, threads that spin made generation 5 to 7 times slower (two threads, two cores, load 10).
    """
    remote: Any = ray.remote  # Ray's stubs do not know concurrency_groups on classes
    return remote(concurrency_groups={"submit": 1, "collect": COLLECTORS, "update": 1, "feed": 1, "health": 1})(cls)
