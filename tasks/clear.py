"""clear: the end of a supervised step; its keys leave the data plane. (`rollout.settle` is that of a GRPO step.)"""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.rollout.supervised import SupervisedCollector
from tasks.call import RETRIED, ask
from tasks.data_plane import data_plane_metrics


@task(name="clear", task_run_name="clear-{step}", **RETRIED)
def clear(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float) -> dict[str, float]:
    """Forget exactly this step's samples. Returns what the data plane did for the run so far."""
    ask(namespace, names.COLLECTOR, timeout_s, SupervisedCollector.clear, meta)
    return data_plane_metrics(namespace, timeout_s)
