"""What the data plane did for a run so far."""

from __future__ import annotations

from actors import names
from actors.policy.group import PolicyGroup
from actors.rollout.collector import Collector
from tasks.call import ask


def data_plane_metrics(namespace: str, timeout_s: float) -> dict[str, float]:
    """Calls, errors, rows, bytes and latencies of the collector's and the workers' clients since the start, and what partitions hold.

    Raises:
        ActorGoneError, ActorTimeoutError.
    """
    usage = ask(namespace, names.POLICY, timeout_s, PolicyGroup.data_plane_usage)
    return ask(namespace, names.COLLECTOR, timeout_s, Collector.data_plane_metrics, usage)
