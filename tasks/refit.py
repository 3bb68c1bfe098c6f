"""refit: the policy's weights go into the running engines."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.generation.types import UpdateOptions
from tasks.call import RETRIED, call


@task(name="refit", task_run_name="refit-{step}", **RETRIED)
def refit(namespace: str, step: str, engines: list[str], update: UpdateOptions, timeout_s: float) -> dict[str, float]:
    """Returns the new weight version, seconds, bytes, and for how long running requests stood still."""
    result: dict[str, float] = call(namespace, names.POLICY, "refit", engines, update, timeout_s=timeout_s)
    return result
