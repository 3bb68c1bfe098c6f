"""Flow runs of a work pool that are at work, and their end.

A run whose worker was killed would stay Pending or Running for ever, and hold the only place of a pool with a limit of 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Cancelling

_AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


def at_work(client: SyncPrefectClient, pool: str) -> list[FlowRun]:
    """Those that hold a place of the pool."""
    return client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_AT_WORK))),
        work_pool_filter=filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool])),
    )


def cancel(client: SyncPrefectClient, runs: Sequence[FlowRun], timeout_s: float) -> None:
    """Cancel the runs as the UI does, so that each ends with its report; those that take longer are Cancelled without."""
    for run in runs:
        client.set_flow_run_state(run.id, Cancelling(), force=True)
    deadline = time.monotonic() + timeout_s
    for run in runs:
        while not ended(client, run) and time.monotonic() < deadline:
            time.sleep(0.3)
        force(client, run, Cancelled())


def force(client: SyncPrefectClient, run: FlowRun, state: State[Any]) -> None:
    """Give the run this state unless it has ended."""
    if not ended(client, run):
        client.set_flow_run_state(run.id, state, force=True)


def ended(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Whether the run is in a final state."""
    state = client.read_flow_run(run.id).state
    return state is not None and state.is_final()
