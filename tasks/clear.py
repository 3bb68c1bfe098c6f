"""clear: the end of a supervised step; its keys leave the data plane. (Of a GRPO step: `rollout.settle`.) And what the plane did so far."""

from __future__ import annotations

from prefect import task

from actors import names
from actors.data_plane.meta import KVBatchMeta
from actors.policy.group import PolicyGroup
from actors.rollout.collector import Collector
from actors.rollout.supervised import SupervisedCollector
from tasks.call import RETRIED, ask


@task(name="clear", task_run_name="clear-{step}", **RETRIED)
def clear(namespace: str, step: int, meta: KVBatchMeta, timeout_s: float) -> dict[str, float]:
    """Forget exactly this step's samples. Returns what the data plane did for the run so far."""
    ask(namespace, names.COLLECTOR, timeout_s, SupervisedCollector.clear, meta)
    return data_plane_metrics(namespace, timeout_s)


def data_plane_metrics(namespace: str, timeout_s: float) -> dict[str, float]:
    """Calls, errors, rows, bytes and latencies of the collector's and the workers' clients since the start, and what partitions hold.

    Raises:
        ActorGoneError, ActorTimeoutError.
    """
    usage = ask(namespace, names.POLICY, timeout_s, PolicyGroup.data_plane_usage)
    return ask(namespace, names.COLLECTOR, timeout_s, Collector.data_plane_metrics, usage)
