"""refit: the policy's weights go into the running engines."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.generation.types import UpdateOptions
from actors.policy.group import PolicyGroup
from actors.policy.turns import Turn
from tasks.call import RETRIED, ask, withdrawable


@task(name="refit", task_run_name="refit-{step}", **RETRIED)
@withdrawable
def refit(
    namespace: str, step: str, engines: list[str], update: UpdateOptions, timeout_s: float, turn: Turn | None = None
) -> dict[str, float]:
    """Returns the new weight version, seconds, bytes, and for how long running requests stood still.

    Args:
        timeout_s: of one stage; those that it comes after take their own time.
        turn: inside a step: the stages that it comes after.
    """
    patience = turn.patience if turn else 1
    return ask(namespace, names.POLICY, timeout_s * patience, PolicyGroup.refit, engines, update, turn)
