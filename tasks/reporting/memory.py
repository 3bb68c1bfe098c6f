"""A run's memory plan beside what its workers measured: in summary.json, in the lines at the end, in report.html.

gpu_memory/<stage>_..._gib of every step ──► Peaks ─┐
memory_plan.stages ─────────────────────────────────┴► compared ──► MemoryUse by stage
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

_PREFIX = "gpu_memory/"


class MemoryUse(BaseModel, frozen=True, extra="forbid"):
    """GiB of one stage, at most over the steps.

    Attributes:
        gpu_planned, gpu_measured: of the GPU of a worker, all processes together; measured when the stage had ended.
        worker_planned, worker_measured: of them what torch holds in the worker, at most during the stage.
    """

    gpu_planned: float
    gpu_measured: float | None
    worker_planned: float
    worker_measured: float | None


class Peaks:
    """The largest value of each memory metric of a run."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def see(self, metrics: Mapping[str, float | None]) -> None:
        """Metrics of a step."""
        for name, value in metrics.items():
            if name.startswith(_PREFIX) and value is not None:
                self._largest[name] = max(value, self._largest.get(name, 0.0))

    def __bool__(self) -> bool:
        return bool(self._largest)

    def compared(self, planned: Mapping[str, tuple[float, float]]) -> dict[str, MemoryUse]:
        """By stage, of those that measured something. `planned`: GiB of the GPU, and of torch in the worker (`memory_plan.stages`)."""
        found = {}
        for stage, (on_gpu, in_worker) in planned.items():
            gpu, worker = (self._largest.get(f"{_PREFIX}{stage}_{what}_gib") for what in ("device", "reserved"))
            if gpu is not None or worker is not None:
                found[stage] = MemoryUse(gpu_planned=on_gpu, gpu_measured=gpu, worker_planned=in_worker, worker_measured=worker)
        return found
