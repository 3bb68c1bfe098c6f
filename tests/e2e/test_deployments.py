"""After `make up`: a deployment runs to its end, a schedule fires, and however a run is stopped, its actors go and nothing else does."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import TaskRunSort
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import Flow

from flows.grpo import grpo
from flows.sft import sft
from tasks.reporting.jsonl import read_lines
from tests.conftest import ROOT
from tests.e2e.conftest import DEPLOYMENT, Watched
from tests.e2e.deployed import Deployed, await_true, gone
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow

RELEASE_S = 60  # what an ended run held is free within this: the promise of docs/deployment.md
STAGES = ("rollout", "ref-logprob", "advantage", "train", "refit", "clear")
_SMALL = [
    "model.hidden_size=64",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.num_hidden_layers=2",
    "patience=null",
]


def artifacts(client: SyncPrefectClient, run: FlowRun) -> dict[str | None, Any]:
    found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id])))
    return {artifact.key: artifact.data for artifact in found}


def test_a_deployment_runs_to_completed(deployed: Deployed, watched: Watched) -> None:
    run, printed = watched.run, watched.printed
    assert "Completed" in printed
    recipe = run.parameters["recipe"]
    assert run.name.startswith(f"{DEPLOYMENT.partition('/')[0]}-{recipe}-20")
    found = deployed.client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])), limit=200)
    shown = artifacts(deployed.client, run)
    states = {task.name: task.state_name for task in found}
    assert {states[f"{stage}-{step}"] for stage in STAGES for step in (1, 2)} == {"Completed"}
    assert states["generate"] == "Completed"
    assert "rollout-3" not in states  # `steps` of the form is what counts, not the recipe's
    assert {"grpo-progress", "grpo-rollout", "grpo-metrics", "grpo-reward", "grpo-summary"} <= set(shown)
    assert shown["grpo-progress"] == 100
    assert str(shown["grpo-reward"]).startswith("data:image/svg+xml;base64,")


def test_nothing_of_the_run_is_left(deployed: Deployed, watched: Watched) -> None:
    assert watched
    await_true("actors of an ended run", lambda: not deployed.actor_processes(), RELEASE_S)
    assert deployed.actors() == []


def test_everything_listens_on_loopback_only(watched: Watched) -> None:
    """The sockets of server, Ray and worker, and of all that they started, while a run was at work."""
    assert {"ray::Controller", "ray::Engine", "ray::PolicyWorkerActor"} <= {door.title.partition(".")[0] for door in watched.doors}
    assert {door for door in watched.doors if not door.on_loopback} == set()


def test_a_cron_schedule_fires(deployed: Deployed) -> None:
    """With SQLAlchemy 2.1 the server would never create a run (its log alone says so)."""

    def ticked() -> list[FlowRun]:
        return [run for run in deployed.runs("tick/cron") if run.state_type and run.state_type.value == "COMPLETED"]

    await_true("a tick", ticked, WAIT_S)
    run = ticked()[0]
    assert run.auto_scheduled
    assert run.expected_start_time is not None
    assert run.expected_start_time.second == 0
    late = datetime.now(UTC) - run.expected_start_time
    assert timedelta(seconds=-0.5) <= late < timedelta(minutes=30)  # Prefect rounds the wait to whole seconds
    deployed.stop_ticking()  # a run every minute would cost the other tests a process each


@pytest.mark.parametrize(
    ("flow", "parameters", "message"),
    [
        (grpo, {"recipe": "arithmetic-cp"}, "no recipe 'arithmetic-cp': did you mean 'arithmetic-cpu'?"),
        (sft, {"overrides": ["ray.address=127.0.0.1:1"]}, "ray.address: no Ray cluster answers at '127.0.0.1:1'"),
    ],
    ids=["no such recipe", "no such cluster"],
)
def test_wrong_input_is_one_clear_message_in_the_state(
    server: str, tmp_path: Path, flow: Flow[..., Any], parameters: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client

    import tasks.cluster

    monkeypatch.setattr(tasks.cluster.ray, "is_initialized", lambda: False)  # as in a process of the flow's own
    overrides = [*parameters.get("overrides", []), f"output_dir={tmp_path}"]
    ended = flow(**{"recipe": flow.parameters.properties["recipe"]["default"], **parameters, "overrides": overrides}, return_state=True)
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(str(ended.state_details.flow_run_id)).state
    assert state is not None
    assert state.type.value == "FAILED"
    assert message in str(state.message)
    assert "\n" not in str(state.message)


def test_a_server_takes_the_kubernetes_template(deployed: Deployed) -> None:
    """A server refuses one in which a placeholder has no variable."""
    template = json.loads((ROOT / "docs" / "kubernetes" / "base-job-template.json").read_text())
    deployed.client.create_work_pool(WorkPoolCreate(name="cluster", type="kubernetes", base_job_template=template))
    stored = deployed.client.read_work_pool("cluster").base_job_template
    container = stored["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    del template["variables"]["properties"]["gpus"]
    with pytest.raises(PrefectHTTPStatusError, match="gpus"):
        deployed.client.create_work_pool(WorkPoolCreate(name="broken", type="kubernetes", base_job_template=template))


def test_a_parameter_of_the_wrong_type_is_refused_at_once(deployed: Deployed) -> None:
    with pytest.raises(PrefectHTTPStatusError, match="steps"):
        deployed.begin("sft/default", steps="many")


def steps_done(directory: Path) -> list[int]:
    return sorted({row["step"] for row in read_lines(directory / "metrics.jsonl")})


def begin_training(deployed: Deployed) -> tuple[FlowRun, Path]:
    """A run of many steps that has a checkpoint; and its directory."""
    output = Path(deployed.output) / os.urandom(4).hex()
    run = deployed.begin("sft/default", overrides=[*_SMALL, f"output_dir={output}"], steps=5000)
    saved: list[Path] = []

    def begun() -> bool:
        state = deployed.state(run)
        assert state[0] in {"SCHEDULED", "PENDING", "RUNNING"}, state
        saved[:] = output.glob("*/checkpoints/*.json")
        return state[0] == "RUNNING" and bool(saved)

    try:
        await_true("the run's begin", begun, WAIT_S)
    except AssertionError:
        deployed.cancel(run)  # else it would take the other tests' time
        raise
    return run, saved[0].resolve().parent.parent


def await_another_process(deployed: Deployed, run: FlowRun, pid: int, count: int) -> None:
    """Until another process than this one does the run; it is the `count`-th that does."""

    def went_on() -> bool:
        now = deployed.client.read_flow_run(run.id)
        return now.run_count == count and now.state_name == "Running" and now.infrastructure_pid not in (None, str(pid))

    await_true("another process", went_on, WAIT_S)


def await_end_of_actors(deployed: Deployed) -> None:
    await_true("the actors' end", lambda: not deployed.actor_processes(), RELEASE_S)


def test_a_run_loses_its_process_then_its_worker_goes_on_and_is_cancelled(deployed: Deployed) -> None:
    """One run for all three: what takes long is its start.

    Its process is killed: its actors end, and a new one goes on from the checkpoint. The worker is killed while that one starts its actors:
    without a worker nobody would ever end the run, and the pool takes one at a time. Another `make up` starts the worker and leaves the
    rest as it is. Cancelling ends the run's actors and nothing else.
    """
    before, parts = deployed.actor_processes(), deployed.record.parts
    run, directory = begin_training(deployed)
    during, forks, actors = deployed.actor_processes(), deployed.forks(), deployed.actors()
    assert before == []
    for titles in (during, forks):
        assert {"ray::PolicyGroup", "ray::PolicyWorkerActor"} <= {title.partition(".")[0] for title in titles}
    assert {"policy", "policy-worker-0", "collector"} <= set(actors)
    first = deployed.pid(run)
    os.kill(first, signal.SIGKILL)
    await_end_of_actors(deployed)
    assert deployed.actors() == []

    await_another_process(deployed, run, first, 2)
    second = deployed.pid(run)
    await_true("its actors", deployed.actor_processes, WAIT_S)
    done = len(steps_done(directory))
    os.kill(parts["worker"].pid, signal.SIGKILL)
    printed = deployed.up()
    for line in ("worker: had ended by itself", deployed.url, "deployment run grpo/async --watch"):
        assert line in printed
    assert printed.index("deploying") < printed.index("worker: starting")  # a run would keep the server's database busy
    assert gone(second)
    await_another_process(deployed, run, second, 3)
    after = deployed.record.parts
    assert {name for name in parts if after[name] != parts[name]} == {"worker"}

    await_true("more steps", lambda: len(steps_done(directory)) > done + 20, WAIT_S)
    steps = steps_done(directory)
    assert steps == list(range(len(steps)))
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, "latest"}
    third = deployed.pid(run)
    deployed.cancel(run)
    await_true("the flow's end", lambda: gone(third), RELEASE_S)
    await_end_of_actors(deployed)
    await_true("Cancelled", lambda: deployed.state(run)[0] == "CANCELLED", RELEASE_S)
    own, latest = FlowRunFilter(id=FlowRunFilterId(any_=[run.id])), TaskRunSort.EXPECTED_START_TIME_DESC
    found = deployed.client.read_task_runs(flow_run_filter=own, sort=latest, limit=200)
    assert [(task.name, task.state.message) for task in found if task.state is not None and task.state.is_failed()] == []
    assert deployed.actors() == []
    assert deployed.record.parts == after
    assert all(part.alive() for part in after.values())
