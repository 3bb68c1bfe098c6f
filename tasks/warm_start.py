"""warm start: a few supervised steps on the environment's own answers. One task run for a stretch of steps, as each takes milliseconds."""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from actors import names
from configs.policy import OptimizerConfig
from tasks.call import STAGE, call


@task(name="begin-warm-start", task_run_name="begin-warm-start", **STAGE)
def begin_warm_start(namespace: str, optimizer: OptimizerConfig, timeout_s: float) -> None:
    """An optimizer with the warm start's learning rate."""
    call(namespace, names.POLICY, "reset_optimizer", optimizer, timeout_s=timeout_s)


@task(name="warm-start", task_run_name="warm-start-{first}-to-{last}", **STAGE)
def warm_start(namespace: str, first: int, last: int, timeout_s: float) -> list[dict[str, float]]:
    """Supervised steps first..last. Returns each one's metrics."""
    history = []
    for step in range(first, last + 1):
        meta = call(namespace, names.COLLECTOR, "supervised", step, timeout_s=timeout_s)
        try:
            history.append(call(namespace, names.POLICY, "train", meta, "sft", timeout_s=timeout_s))
        finally:
            call(namespace, names.COLLECTOR, "clear", meta, timeout_s=timeout_s)
    get_run_logger().info("warm start steps %d to %d: loss %.3f", first, last, history[-1]["loss"])
    return history
