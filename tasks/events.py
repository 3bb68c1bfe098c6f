"""Events of a run that automations can match: what happened, to which run, with numbers.

| event | resource | payload | when |
|---|---|---|---|
| grpo.step.completed | grpo.run.<flow run id> | flow, step, metrics | a training step is done |
| grpo.refit.completed | grpo.run.<flow run id> | step, weight_version, seconds, bytes | the engines have new weights |
| grpo.lost | grpo.run.<flow run id> | line | a part of the run died or is silent; the run goes on from a checkpoint |
| grpo.engine.lost | grpo.run.<flow run id> | engine, line | async: an engine died or is silent; the others go on, and it may come back |
| grpo.engine.back | grpo.run.<flow run id> | engine | async: it serves again, with the run's weights |
| grpo.guard | grpo.run.<flow run id> | line | a guard has tripped: the step's update was not made |
| grpo.stalled | grpo.run.<flow run id> | line | training has waited for rollouts longer than `stall_report_every_s` |
| model.promoted | grpo.model.<name> | the lineage | retraining found a better model |

The flow run is a related resource of each (Prefect adds it, with the deployment, the flow and its tags), so an automation's action on "the
flow run of the event" needs no id. Call inside the flow, in its thread; an event costs 0.1 ms and is sent in the background.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prefect import runtime
from prefect.events import emit_event

STEP_COMPLETED, REFIT_COMPLETED, STALLED, LOST = "grpo.step.completed", "grpo.refit.completed", "grpo.stalled", "grpo.lost"
GUARD = "grpo.guard"
ENGINE_LOST, ENGINE_BACK = "grpo.engine.lost", "grpo.engine.back"
PROMOTED = "model.promoted"


def step_completed(flow: str, step: int, metrics: Mapping[str, float]) -> None:
    """A step with its metrics, but for those that are not finite (JSON has no NaN) and the data plane's own."""
    shown = {name: value for name, value in metrics.items() if math.isfinite(value) and not name.startswith("data_plane/")}
    _emit(STEP_COMPLETED, {"flow": flow, "step": step, "metrics": shown})


def refit_completed(step: int, refit: Mapping[str, float]) -> None:
    """`refit` as the task returns it: weight_version, refit_s, bytes."""
    payload = {"step": step, "weight_version": int(refit["weight_version"]), "seconds": refit["refit_s"], "bytes": int(refit["bytes"])}
    _emit(REFIT_COMPLETED, payload)


def stalled(line: str) -> None:
    """Training waits; `line` says for how long and for what."""
    _emit(STALLED, {"line": line})


def lost(line: str) -> None:
    """`line` says what was lost, and from where the run goes on."""
    _emit(LOST, {"line": line})


def engine_lost(engine: str, line: str) -> None:
    """`line` says why."""
    _emit(ENGINE_LOST, {"engine": engine, "line": line})


def engine_back(engine: str) -> None:
    """A lost engine serves again."""
    _emit(ENGINE_BACK, {"engine": engine})


def guard_tripped(line: str) -> None:
    """`line` says which guard, why, and what happens."""
    _emit(GUARD, {"line": line})


def promoted(name: str, lineage: Mapping[str, Any]) -> None:
    """A model is the promoted one of this name now. `lineage` must be JSON: parent, hashes, metrics."""
    _emit(PROMOTED, dict(lineage), {"prefect.resource.id": f"grpo.model.{name}", "prefect.resource.name": name})


def _emit(event: str, payload: dict[str, Any], resource: dict[str, str] | None = None) -> None:
    run = runtime.flow_run
    emit_event(
        event, resource=resource or {"prefect.resource.id": f"grpo.run.{run.id}", "prefect.resource.name": str(run.name)}, payload=payload
    )
