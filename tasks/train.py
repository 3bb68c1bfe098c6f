"""train: optimizer steps on one batch, of GRPO, of supervised fine-tuning, or of the warm start."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.policy.group import PolicyGroup
from actors.policy.limits import Limits
from actors.policy.turns import Turn
from configs.policy import OptimizerConfig
from tasks.call import STAGE, ask, withdrawable

_ANSWER_S = 60.0


@task(name="train", task_run_name="train-{step}", **STAGE)
@withdrawable
def train(
    namespace: str, step: int, meta: KVBatchMeta, objective: str, timeout_s: float, turn: Turn, limits: Limits | None = None
) -> dict[str, float]:
    """One step: `PolicyGroup.train`.

    Args:
        timeout_s: of one stage; those that it comes after take their own time.
    """
    return ask(namespace, names.POLICY, timeout_s * turn.patience, PolicyGroup.train, meta, objective, turn, limits)


@task(name="pass-over", task_run_name="pass-over-{step}", **STAGE)
@withdrawable
def pass_over(namespace: str, step: int, timeout_s: float, turn: Turn) -> dict[str, float]:
    """In place of `train`, when a guard saw before it that the step is not to be trained. Arguments as of `train`."""
    ask(namespace, names.POLICY, timeout_s * turn.patience, PolicyGroup.pass_over, turn)
    return {"tokens": 0.0, "updates": 0.0}


def scale_rate(namespace: str, factor: float, timeout_s: float) -> None:
    """Multiply the learning rate of all further steps by this factor.

    Args:
        timeout_s: of one stage; a refit may be under way.
    """
    ask(namespace, names.POLICY, 2 * timeout_s, PolicyGroup.scale_rate, factor)


def place(namespace: str, timeout_s: float) -> str:
    """What computes: `PolicyGroup.place`."""
    return ask(namespace, names.POLICY, timeout_s, PolicyGroup.place)


def withdraw(namespace: str, step: int) -> None:
    """The step's stages that wait at the policy group do not begin any more."""
    ask(namespace, names.POLICY, _ANSWER_S, PolicyGroup.withdraw, step)


@task(name="begin-grpo", task_run_name="begin-grpo", **STAGE)
def begin_grpo(namespace: str, optimizer: OptimizerConfig, with_reference: bool, timeout_s: float) -> None:
    """Fresh optimizer, and the weights as they are now become the reference policy (if a KL term wants one)."""
    ask(namespace, names.POLICY, timeout_s, PolicyGroup.reset_optimizer, optimizer)
    if with_reference:
        ask(namespace, names.POLICY, timeout_s, PolicyGroup.snapshot_reference)
