"""warm start: supervised steps on the environment's own answers: the steps of the `sft` flow, as one task run for a stretch of them,
as each takes milliseconds.
"""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from actors import names
from actors.policy.group import PolicyGroup
from actors.rollout.collector import Collector
from configs.policy import OptimizerConfig
from tasks.call import STAGE, ask


@task(name="begin-warm-start", task_run_name="begin-warm-start", **STAGE)
def begin_warm_start(namespace: str, optimizer: OptimizerConfig, timeout_s: float) -> None:
    """An optimizer with the warm start's learning rate."""
    ask(namespace, names.POLICY, timeout_s, PolicyGroup.reset_optimizer, optimizer)


@task(name="warm-start", task_run_name="warm-start-{first}-to-{last}", **STAGE)
def warm_start(namespace: str, first: int, last: int, timeout_s: float) -> list[dict[str, float]]:
    """Supervised steps first..last, beside engines that sleep, if they may; a refit follows. Returns each step's metrics."""
    history = []
    ask(namespace, names.COLLECTOR, timeout_s, Collector.sleep_engines)
    for step in range(first, last + 1):
        batch = ask(namespace, names.COLLECTOR, timeout_s, Collector.supervised, step)
        try:
            history.append(ask(namespace, names.POLICY, timeout_s, PolicyGroup.train, batch, "sft"))
        finally:
            ask(namespace, names.COLLECTOR, timeout_s, Collector.clear, batch)
    get_run_logger().info("warm start steps %d to %d: loss %.3f", first, last, history[-1]["loss"])
    return history
