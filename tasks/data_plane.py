"""What the data plane did for a run so far."""

from __future__ import annotations

from actors import names
from tasks.call import call


def data_plane_metrics(namespace: str, timeout_s: float) -> dict[str, float]:
    """Calls, errors, rows, bytes and latencies of the collector's and the workers' clients since the start, and what partitions hold.

    Raises:
        ActorGoneError, ActorTimeoutError.
    """
    usage = call(namespace, names.POLICY, "data_plane_usage", timeout_s=timeout_s)
    metrics: dict[str, float] = call(namespace, names.COLLECTOR, "data_plane_metrics", usage, timeout_s=timeout_s)
    return metrics
