"""logprob and ref_logprob: the policy's, and the reference's, log-probabilities of the sampled tokens, as columns."""

from __future__ import annotations

from prefect import task
from prefect.client.schemas import State
from prefect.states import Completed

from actors.data_plane.meta import KVBatchMeta
from actors.policy.group import PolicyGroup
from actors.policy.turns import Turn
from tasks.call import RETRIED, ask_in_turn

POLICY_LOGPROBS, REFERENCE_LOGPROBS = "policy_logprobs", "reference_logprobs"


@task(name="logprob", task_run_name="logprob-{step}", **RETRIED)
def logprob(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float, skip_reason: str | None = None) -> dict[str, float] | State:
    """Write `policy_logprobs`; or, with a reason, show in the UI that this configuration needs none."""
    return _written(namespace, Turn(step, "logprob"), meta, POLICY_LOGPROBS, timeout_s, skip_reason)


@task(name="ref_logprob", task_run_name="ref-logprob-{step}", **RETRIED)
def ref_logprob(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float, skip_reason: str | None = None) -> dict[str, float] | State:
    """Write `reference_logprobs`; or, with a reason, show in the UI that this configuration needs none."""
    return _written(namespace, Turn(step, "ref_logprob"), meta, REFERENCE_LOGPROBS, timeout_s, skip_reason)


def _written(
    namespace: str, turn: Turn, meta: KVBatchMeta, column: str, timeout_s: float, skip_reason: str | None
) -> dict[str, float] | State:
    if skip_reason:
        return Completed(name="Skipped", message=skip_reason)
    return ask_in_turn(namespace, turn, timeout_s, PolicyGroup.logprob, meta, column, column == REFERENCE_LOGPROBS, turn)
