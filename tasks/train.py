"""train: optimizer steps on one batch, GRPO's or the warm start's."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from configs.policy import OptimizerConfig
from tasks.call import STAGE, call


@task(name="train", task_run_name="train-{step}", **STAGE)
def train(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float) -> dict[str, float]:
    """One GRPO step. Returns loss, KL, clip fraction, gradient norm, log-probability error, tokens and FLOP rate."""
    result: dict[str, float] = call(namespace, names.POLICY, "train", meta, "grpo", timeout_s=timeout_s)
    return result


@task(name="begin-grpo", task_run_name="begin-grpo", **STAGE)
def begin_grpo(namespace: str, optimizer: OptimizerConfig, with_reference: bool, timeout_s: float) -> None:
    """Fresh optimizer, and the weights as they are now become the reference policy (if a KL term wants one)."""
    call(namespace, names.POLICY, "reset_optimizer", optimizer, timeout_s=timeout_s)
    if with_reference:
        call(namespace, names.POLICY, "snapshot_reference", timeout_s=timeout_s)
