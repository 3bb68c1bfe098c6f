"""Starts a run's actors, all at once, and ends them.

    driver (flow process) ── owns ──► data plane, engines, environment, collector, policy group ── owns ──► policy workers

Ray ends what a driver owns when the driver ends, however it ends: return, failure, cancellation or SIGKILL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from prefect import task

from actors import names
from actors.data_plane import transfer_queue as queue
from actors.data_plane.connect import DataPlaneAddress
from actors.environments.actor import EnvironmentActor
from actors.generation.engine import engine_actor_class
from actors.policy.group import PolicyGroup
from actors.preflight import longest_sample
from actors.rollout.collector import Collector
from actors.rollout.prompts import end_token_ids
from actors.waiting import wait_all
from configs import settings
from configs.run import RunConfig
from tasks.call import STAGE


@dataclass(frozen=True)
class RunActors:
    """Where a run's actors are. Small and picklable: names and an address, no handles."""

    namespace: str
    address: DataPlaneAddress
    engines: list[str]
    ready: dict[str, str]


def planned_actors(config: RunConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch` would start."""
    parallel = config.policy.parallel
    layout = f"DP{parallel.data} TP{parallel.tensor} PP{parallel.pipeline} CP{parallel.context}"
    engine = f"vLLM, {config.generation.executor}, {config.generation.dtype}"
    return [
        ("data plane", f"TransferQueue: a controller and {config.data_plane.num_storage_units} storage unit(s)"),
        *((name, engine) for name in names.engines(config.generation.num_engines)),
        (names.ENVIRONMENT, f"rewards: {config.environment.kind}"),
        (names.COLLECTOR, f"{config.rollout.prompts_per_step} prompts x {config.rollout.responses_per_prompt} responses a step"),
        (names.POLICY, f"owns the workers ({layout})"),
        *((f"policy-worker-{rank}", f"Megatron-Core, {config.policy.dtype}") for rank in range(parallel.world_size)),
    ]


def logical_cpus(config: RunConfig) -> int:
    """What the actors ask Ray for, when the cluster is the run's own: one per engine and per policy worker, and one to spare."""
    return config.generation.num_engines + config.policy.parallel.world_size + 1


# The handles keep the actors alive; they belong to this process, and so end with it.
_handles: dict[str, dict[str, Any]] = {}


@task(name="launch", task_run_name="launch-actors", **STAGE)
def launch(config: RunConfig, model_path: str, namespace: str) -> RunActors:
    """Start every actor of the run at once, and wait until all can work.

    Raises:
        ActorGoneError, ActorTimeoutError: one died or was not ready in time; the message names it. What did start is ended.
    """
    handles: dict[str, Any] = {}
    _handles[namespace] = handles
    address: DataPlaneAddress | None = None
    try:
        # The engine takes longest, so it goes first.
        engines = _start_engines(handles, config, model_path, namespace)
        _start(handles, names.ENVIRONMENT, EnvironmentActor, namespace, config.environment, config.seed)
        address = queue.start(namespace, config.data_plane)
        _start(
            handles, names.POLICY, PolicyGroup, namespace,
            config.policy, model_path, namespace, address, config.data_plane.timeout_s, config.seed, config.rollout.temperature,
            _computing(config.policy.parallel.world_size), longest_sample(config, model_path),
        )  # fmt: skip
        _start(handles, names.COLLECTOR, Collector, namespace, config, model_path, namespace, engines, names.ENVIRONMENT, address)
        ready = wait_all(
            {name: handle.ready.remote() for name, handle in handles.items()},
            what="start",
            timeout_s=config.generation.timeout_s,
        )
    except BaseException:
        stop(namespace, address)
        raise
    return RunActors(namespace, address, engines, ready)


def stop(namespace: str, address: DataPlaneAddress | None = None) -> None:
    """End the run's actors, the newest first. Idempotent; touches nothing else in the cluster."""
    handles = _handles.pop(namespace, {})
    if not ray.is_initialized():
        return
    for handle in reversed(handles.values()):
        ray.kill(handle)
    if address is not None:
        queue.stop(address)


def _start_engines(handles: dict[str, Any], config: RunConfig, model_path: str, namespace: str) -> list[str]:
    engine, ends = engine_actor_class(), end_token_ids(model_path)
    found = names.engines(config.generation.num_engines)
    options = _computing(len(found))
    for index, name in enumerate(found):
        handles[name] = engine.options(name=name, namespace=namespace, **options).remote(
            config.generation, model_path, config.seed + index, ends
        )
    return found


def _start(handles: dict[str, Any], name: str, cls: Callable[..., Any], namespace: str, *arguments: Any) -> None:
    handles[name] = ray.remote(cls).options(name=name, namespace=namespace, num_cpus=0).remote(*arguments)


def _computing(processes: int) -> dict[str, Any]:
    """Ray options of actors that compute: one logical CPU each; threads share the machine's cores evenly."""
    threads = str(max(1, settings.cpu_count() // processes))
    # Passive: engines and workers take turns on the same cores, and a thread that spins at a barrier takes the other's turn.
    return {"num_cpus": 1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}}}
