"""Starts a run's actors, all at once, and ends them.

    driver (flow process) ── owns ──► data plane, engines, environment, collector, policy group ── owns ──► policy workers

Ray ends what a driver owns when the driver ends, however it ends: return, failure, cancellation or SIGKILL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from prefect import task

from actors import names
from actors.data_plane import transfer_queue as queue
from actors.environments.actor import EnvironmentActor
from actors.generation.engine import engine_actor_class
from actors.policy.group import PolicyGroup
from actors.rollout.collector import Collector
from actors.waiting import wait_all
from configs.run import RunConfig
from tasks.call import STAGE

Report = Callable[[str], None]


def planned_actors(config: RunConfig) -> list[tuple[str, str]]:
    """(name, what it does) of every actor that `launch` would start."""
    parallel = config.policy.parallel
    layout = f"DP{parallel.data} TP{parallel.tensor} PP{parallel.pipeline} CP{parallel.context}"
    return [
        ("data plane", f"TransferQueue controller and {config.data_plane.num_storage_units} storage unit(s)"),
        *((name, f"vLLM, {config.generation.executor}, {config.generation.dtype}") for name in names.engines(config.generation.num_engines)),
        (names.ENVIRONMENT, f"rewards: {config.environment.kind}"),
        (names.COLLECTOR, f"{config.rollout.prompts_per_step} prompts x {config.rollout.responses_per_prompt} responses a step"),
        (names.POLICY, f"owns the workers ({layout})"),
        *((f"policy-worker-{rank}", f"Megatron-Core, {config.policy.dtype}") for rank in range(parallel.world_size)),
    ]
