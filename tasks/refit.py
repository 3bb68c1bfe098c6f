"""refit: the policy's weights go into the running engines."""

from __future__ import annotations

from prefect import task
from prefect.client.schemas import State

from actors.generation.types import UpdateOptions
from actors.policy.group import PolicyGroup
from actors.policy.turns import Turn
from tasks.call import RETRIED, ask_in_turn


@task(name="refit", task_run_name="refit-{step}", **RETRIED)
def refit(
    namespace: str, step: str, engines: list[str], update: UpdateOptions, timeout_s: float, turn: Turn | None = None
) -> dict[str, float] | State:
    """Returns the new weight version, seconds, bytes, and for how long running requests stood still.

    Args:
        turn: inside a step: the stages that it comes after.
    """
    return ask_in_turn(namespace, turn, timeout_s, PolicyGroup.refit, engines, update, turn)
