"""logprob and ref_logprob: the policy's, and the reference's, log-probabilities of the sampled tokens, as columns."""

from __future__ import annotations

from prefect import task
from prefect.client.schemas import State
from prefect.states import Completed

from actors.policy.turns import Turn
from tasks.call import RETRIED, call_policy
from tasks.coming import Batch


@task(name="logprob", task_run_name="logprob-{step}", **RETRIED)
def logprob(namespace: str, step: int, batch: Batch, timeout_s: float, skip_reason: str | None = None) -> dict[str, float] | State:
    """Write `policy_logprobs`; or, with a reason, show in the UI that this configuration needs none."""
    if skip_reason:
        return Completed(name="Skipped", message=skip_reason)
    result: dict[str, float] = call_policy(
        namespace, "logprob", batch, "policy_logprobs", False, turn=Turn(step, "logprob"), timeout_s=timeout_s
    )
    return result


@task(name="ref_logprob", task_run_name="ref-logprob-{step}", **RETRIED)
def ref_logprob(namespace: str, step: int, batch: Batch, timeout_s: float, skip_reason: str | None = None) -> dict[str, float] | State:
    """Write `reference_logprobs`; or, with a reason, show in the UI that this configuration needs none."""
    if skip_reason:
        return Completed(name="Skipped", message=skip_reason)
    result: dict[str, float] = call_policy(
        namespace, "logprob", batch, "reference_logprobs", True, turn=Turn(step, "ref_logprob"), timeout_s=timeout_s
    )
    return result
