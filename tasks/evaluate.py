"""validate: greedy answers to the held-out problems."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.rollout.collector import Validation
from tasks.call import RETRIED, call


@task(name="validate", task_run_name="validate-{step}", **RETRIED)
def validate(namespace: str, step: str, weight_version: int, timeout_s: float) -> Validation:
    """Reward and accuracy of the engines' present weights. `step` is a number or a label such as warm-start-20."""
    result: Validation = call(namespace, names.COLLECTOR, "validate", weight_version, timeout_s=timeout_s)
    return result
