"""clear: the end of a step; its keys leave the data plane."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from tasks.call import STAGE, call


@task(name="clear", task_run_name="clear-{step}", **STAGE)
def clear(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float) -> None:
    """Forget exactly this step's samples."""
    call(namespace, names.COLLECTOR, "clear", meta, timeout_s=timeout_s)
