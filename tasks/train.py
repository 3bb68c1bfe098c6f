"""train: optimizer steps on one batch, of GRPO, of supervised fine-tuning, or of the warm start."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.policy.turns import Turn
from actors.policy.worker_actor import Objective
from configs.policy import OptimizerConfig
from tasks.call import STAGE, call, call_policy

_ANSWER_S = 60.0


@task(name="train", task_run_name="train-{step}", **STAGE)
def train(
    namespace: str, step: int, meta: KVBatchMeta, objective: Objective, timeout_s: float, turn: Turn | None = None
) -> dict[str, float]:
    """One step. Returns loss, gradient norm, tokens, TFLOP, TFLOP/s per worker; of grpo also KL, clip fraction, log-probability error.

    Args:
        turn: inside a step: the stages that it comes after.
    """
    result: dict[str, float] = call_policy(namespace, "train", meta, objective, turn=turn, timeout_s=timeout_s)
    return result


def withdraw(namespace: str, step: int) -> None:
    """The step's stages that wait at the policy group do not begin any more."""
    call(namespace, names.POLICY, "withdraw", step, timeout_s=_ANSWER_S)


@task(name="begin-grpo", task_run_name="begin-grpo", **STAGE)
def begin_grpo(namespace: str, optimizer: OptimizerConfig, with_reference: bool, timeout_s: float) -> None:
    """Fresh optimizer, and the weights as they are now become the reference policy (if a KL term wants one)."""
    call(namespace, names.POLICY, "reset_optimizer", optimizer, timeout_s=timeout_s)
    if with_reference:
        call(namespace, names.POLICY, "snapshot_reference", timeout_s=timeout_s)
