"""logprob and ref_logprob: the policy's, and the reference's, log-probabilities of the sampled tokens, as columns."""

from __future__ import annotations

from prefect import task
from prefect.client.schemas import State
from prefect.states import Completed

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.policy.batch import CANDIDATES
from actors.policy.group import PolicyGroup
from actors.policy.turns import Turn
from configs.policy import PolicyConfig
from tasks.call import RETRIED, ask, withdrawable

POLICY_LOGPROBS, REFERENCE_LOGPROBS = "policy_logprobs", "reference_logprobs"


@task(name="logprob", task_run_name="logprob-{step}", **RETRIED)
@withdrawable
def logprob(
    namespace: str, step: int, meta: KVBatchMeta, column: str, timeout_s: float, skip_reason: str | None = None
) -> dict[str, float] | State:
    """Write `policy_logprobs` (or, as `ref_logprob`, `reference_columns`); with a reason, show in the UI that the run needs none."""
    if skip_reason:
        return Completed(name="Skipped", message=skip_reason)
    of_reference = column == REFERENCE_LOGPROBS
    turn = Turn(step, "ref_logprob" if of_reference else "logprob")
    return ask(namespace, names.POLICY, timeout_s, PolicyGroup.logprob, meta, column, of_reference, turn)


ref_logprob = logprob.with_options(name="ref_logprob", task_run_name="ref-logprob-{step}")


def reference_columns(policy: PolicyConfig) -> tuple[str, ...]:
    """What `ref_logprob` writes."""
    return (REFERENCE_LOGPROBS, *CANDIDATES) if policy.has_candidates else (REFERENCE_LOGPROBS,)
