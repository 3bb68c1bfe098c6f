"""clear: the end of a step; its keys leave the data plane."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from tasks.call import RETRIED, call
from tasks.data_plane import data_plane_metrics


@task(name="clear", task_run_name="clear-{step}", **RETRIED)
def clear(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float) -> dict[str, float]:
    """Forget exactly this step's samples. Returns what the data plane did for the run so far."""
    call(namespace, names.COLLECTOR, "clear", meta, timeout_s=timeout_s)
    return data_plane_metrics(namespace, timeout_s)
