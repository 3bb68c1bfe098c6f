"""Coarse work in parallel: task runs of one subflow, in workers of the run's own Ray cluster.

    lanes   a-0 ─► a-1 ─► a-2      shards of one lane run one after the other
            b-0 ─► b-1             several lanes: side by side, a Ray worker and a CPU for each, in one subflow
                                   one lane: in this process, without a subflow

Side by side costs some seconds (a subflow, and Ray workers that import the task): small work should be one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import ContextVar
from typing import Any, Concatenate

import ray
from prefect import Flow, Task
from prefect.context import FlowRunContext
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options

from configs import settings
from configs.run import RayConfig
from tasks.nodes import beside_driver, cpus_here

_START_S = 180.0  # until Ray's workers have imported a task, several at once on a laptop
_CANCEL_S = 10.0  # until cancelled shards have told Prefect
_body: ContextVar[Callable[[], None]] = ContextVar("body")


def room() -> int:
    """How many lanes can be worked on side by side: CPUs that nobody has reserved, where this process is. 1 outside of a flow run."""
    if FlowRunContext.get() is None or not ray.is_initialized():
        return 1
    resources: Any = ray.available_resources  # untyped in Ray
    free, here = int(resources().get("CPU", 0)), cpus_here()
    return max(1, free if here is None else min(free, here))


def in_lanes[S, **P, R](
    lanes: Sequence[Iterable[S]],
    keep: Callable[[R], None],
    config: RayConfig,
    timeout_s: float,
    work: Task[Concatenate[S, P], R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Call `work(shard, *args, **kwargs)` for the shards of all lanes. The first failure ends the rest.

    Args:
        lanes: shards by lane. Several lanes may be the same iterator, from which each takes the next shard when it is free.
        keep: function that gets each result, in this process and as soon as it is there.
        config: address of the cluster that this process has joined.
        timeout_s: longest time of one shard, beside the start of its worker.

    Raises:
        TimeoutError: no shard has ended for that time. Exception: what `work` raised.
    """
    if len(lanes) == 1:
        for shard in lanes[0]:
            keep(work.submit(shard, *args, **kwargs).result())
        return
    running: dict[Future[Any], tuple[Any, Iterator[S]]] = {}  # to the task run and its lane

    def start(lane: Iterator[S]) -> None:
        for shard in lane:
            task_run: Any = work.submit(shard, *args, **kwargs)
            running[task_run.wrapped_future.future()] = task_run, lane
            return

    def side_by_side() -> None:
        with remote_options(num_cpus=1, max_retries=0, **beside_driver()):  # where data and tokenizer are
            try:
                for lane in lanes:
                    start(iter(lane))
                while running:
                    # Not ray.wait: what a signal's handler raises in it is lost, and with it a cancellation.
                    done, _ = wait(running, timeout_s + _START_S, FIRST_COMPLETED)
                    if not done:
                        raise TimeoutError(f"{work.name}: no shard of {len(running)} has ended within {timeout_s + _START_S:.0f} s")
                    task_run, lane = running.pop(done.pop())
                    keep(task_run.result())
                    start(lane)
            finally:
                for task_run, _ in running.values():
                    ray.cancel(task_run.wrapped_future)
                wait(running, _CANCEL_S)

    subflow = Flow(_call_body, f"{work.name}-shards", task_runner=RayTaskRunner(_address(config)), persist_result=False)
    token = _body.set(side_by_side)
    try:
        subflow()
    finally:
        _body.reset(token)


def _call_body() -> None:
    # The subflow's function and parameters go to every worker, and what it works with (open files, this process) must not.
    _body.get()()


def _address(config: RayConfig) -> str:
    # Explicit: for None and "auto" RayTaskRunner would start a second cluster wherever Ray has not been joined.
    address = config.address or settings.ray_address() or ""
    return address if address.startswith("ray://") else str(ray.get_runtime_context().gcs_address)
