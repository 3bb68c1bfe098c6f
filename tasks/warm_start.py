"""warm start: supervised steps on the environment's own answers: the steps of the `sft` flow, as one task run for a stretch of them,
as each takes milliseconds.
"""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from actors import names
from configs.policy import OptimizerConfig
from tasks.call import STAGE, call
from tasks.supervised import supervised_batch
from tasks.train import train


@task(name="begin-warm-start", task_run_name="begin-warm-start", **STAGE)
def begin_warm_start(namespace: str, optimizer: OptimizerConfig, timeout_s: float) -> None:
    """An optimizer with the warm start's learning rate."""
    call(namespace, names.POLICY, "reset_optimizer", optimizer, timeout_s=timeout_s)


@task(name="warm-start", task_run_name="warm-start-{first}-to-{last}", **STAGE)
def warm_start(namespace: str, first: int, last: int, timeout_s: float) -> list[dict[str, float]]:
    """Supervised steps first..last. Returns each one's metrics."""
    history = []
    for step in range(first, last + 1):
        batch = supervised_batch.fn(namespace, step, timeout_s).meta
        try:
            history.append(train.fn(namespace, step, batch, "sft", timeout_s))
        finally:
            call(namespace, names.COLLECTOR, "clear", batch, timeout_s=timeout_s)
    get_run_logger().info("warm start steps %d to %d: loss %.3f", first, last, history[-1]["loss"])
    return history
