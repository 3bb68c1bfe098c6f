"""refit: the policy's weights go into the running engines."""

from __future__ import annotations

from prefect import task

from actors import names
from tasks.call import RETRIED, call


@task(name="refit", task_run_name="refit-{step}", **RETRIED)
def refit(namespace: str, step: str, engines: list[str], timeout_s: float) -> dict[str, float]:
    """Returns the new weight version, seconds and bytes."""
    result: dict[str, float] = call(namespace, names.POLICY, "refit", engines, timeout_s=timeout_s)
    return result
