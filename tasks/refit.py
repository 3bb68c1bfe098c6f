"""refit: the policy's weights go into the running engines."""

from __future__ import annotations

from prefect import task
from prefect.client.schemas import State

from actors.generation.types import UpdateOptions
from actors.policy.turns import Turn
from tasks.call import RETRIED, call_policy
from tasks.coming import Coming


@task(name="refit", task_run_name="refit-{step}", **RETRIED)
def refit(
    namespace: str,
    step: str,
    engines: list[str],
    update: UpdateOptions,
    timeout_s: float,
    turn: Turn | None = None,
    weights: Coming[int] | None = None,
) -> dict[str, float] | State:
    """Returns the new weight version, seconds, bytes, and for how long running requests stood still.

    Args:
        turn: inside a step: the stages that it comes after.
        weights: get the new version at once.
    """
    result: dict[str, float] | State = call_policy(namespace, "refit", engines, update, turn=turn, timeout_s=timeout_s)
    if weights is not None and isinstance(result, dict):
        weights.arrive(int(result["weight_version"]))
    return result
