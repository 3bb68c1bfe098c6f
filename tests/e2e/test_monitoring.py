"""What a person sees of a run, and what runs again, on a real server with actors that compute nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.utilities.annotations import quote

from actors import names
from actors.generation.types import GenerationTimeoutError
from actors.policy.turns import Turn
from actors.waiting import ActorGoneError, ActorTimeoutError
from tasks import events
from tasks.actor_logs import ActorLogs
from tasks.evaluate import validate
from tasks.logprob import logprob
from tasks.publish import Publisher
from tasks.reporting.run_dir import RunDirectory
from tasks.train import train
from tests.conftest import ROOT
from tests.patience import WAIT_S, kill
from tests.tasks.reporting import runs

pytestmark = pytest.mark.slow
NAMESPACE = "monitoring"


class Stub:
    """A collector and a policy group. Fails as it is told, and counts."""

    def __init__(self, errors: list[Exception]) -> None:
        self._errors, self._calls = errors, 0

    def _stage(self) -> None:
        self._calls += 1
        if self._errors:
            raise self._errors.pop(0)

    def validate(self, weight_version: int, name: str) -> str:
        self._stage()
        return f"with weights {weight_version}"

    def train(self, meta: Any, objective: str, turn: Any, limits: Any) -> dict[str, float]:
        self._stage()
        return {}

    def calls(self) -> int:
        return self._calls

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)

    def die(self, line: str) -> None:
        logging.basicConfig(format="%(levelname)s %(message)s")
        logging.getLogger("dying").error(line)
        import os

        os._exit(1)


@pytest.fixture
def actor(ray_session: None) -> Iterator[Callable[..., Any]]:
    """Starts the actor that a task finds under its name."""
    handles = []

    def start(name: str, *failures: Exception) -> Any:
        handles.append(ray.remote(Stub).options(name=name, namespace=NAMESPACE, num_cpus=0).remote(list(failures)))
        ray.get(handles[-1].calls.remote())
        return handles[-1]

    yield start
    for handle in handles:
        ray.kill(handle)
        deadline = time.monotonic() + 10
        while any(one["namespace"] == NAMESPACE for one in ray.util.list_named_actors(all_namespaces=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def try_validate() -> Any:
    """The task as it is, but for the length of its waits."""
    return validate.with_options(retry_delay_seconds=[0.1, 0.1])(NAMESPACE, "1", 7, 30.0)


def in_flow(work: Callable[[], Any]) -> Any:
    """Its value, computed inside a flow run."""

    @flow(name="monitoring")
    def run() -> Any:
        return work()

    return run()


@pytest.mark.parametrize("failure", [ActorTimeoutError("silent"), GenerationTimeoutError("slow")], ids=["silent", "slow"])
def test_an_idempotent_stage_runs_again(server: str, actor: Callable[..., Any], failure: Exception) -> None:
    started = actor(names.COLLECTOR, failure, failure)
    assert try_validate() == "with weights 7"
    assert ray.get(started.calls.remote()) == 3


def test_it_gives_up_with_the_last_error(server: str, actor: Callable[..., Any]) -> None:
    started = actor(names.COLLECTOR, *[ActorTimeoutError(f"silence {n}") for n in range(5)])
    with pytest.raises(ActorTimeoutError, match="silence 2"):
        try_validate()
    assert ray.get(started.calls.remote()) == 3


def test_wrong_data_is_wrong_the_second_time_too(server: str, actor: Callable[..., Any]) -> None:
    started = actor(names.COLLECTOR, ValueError("no such column"))
    with pytest.raises(ValueError, match="no such column"):
        try_validate()
    assert ray.get(started.calls.remote()) == 1


def test_a_stage_that_is_not_needed_calls_nobody(server: str) -> None:
    def work() -> str | None:
        skipped = logprob.submit("nobody", 1, quote(None), "policy_logprobs", 30.0, "not needed")
        skipped.wait()
        return skipped.state.name

    assert in_flow(work) == "Skipped"


def test_a_dead_actor_is_not_waited_for(server: str, actor: Callable[..., Any]) -> None:
    kill(actor(names.COLLECTOR))
    started = time.monotonic()
    with pytest.raises(ActorGoneError, match="collector"):
        try_validate()
    assert time.monotonic() - started < 20


def test_train_is_applied_once(server: str, actor: Callable[..., Any]) -> None:
    started = actor(names.POLICY, ActorTimeoutError("silent"))
    with pytest.raises(ActorTimeoutError):
        train(NAMESPACE, 1, None, "grpo", 30.0, Turn(1, "train"))  # type: ignore[arg-type]
    assert ray.get(started.calls.remote()) == 1


@pytest.fixture(scope="module")
def watched(server: str, log_monitor: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of a flow run with a few steps, whose actor talked and then died."""
    directory = RunDirectory.create(tmp_path_factory.mktemp("runs"), "tiny")

    def work() -> str:
        publisher = Publisher("grpo")
        publisher.begin(4, directory, runs.summary(status="running"))
        with suppress(ActorGoneError), ActorLogs():
            actor = ray.remote(Stub).options(name="engine-7", namespace=NAMESPACE, num_cpus=0).remote([])
            ray.get(actor.say.remote("hello", "WARNING 11-21 the cache is small"))
            ray.get(actor.say.remote(*(f"line {n}" for n in range(500))))
            actor.die.remote("the last words")
            for step in range(1, 5):
                publisher.update(step, runs.step_metrics(step))
                publisher.samples(step, "train", [runs.Said("2 + 2", f"answer {step}", "4", 1.0)])
                events.step_completed("grpo", step, runs.step_metrics(step) | {"loss": float("nan")})
                time.sleep(2.0)  # for an update in place, and for Ray's log monitor, which reads the files of the whole session
            events.refit_completed(4, {"weight_version": 4.0, "refit_s": 0.1, "bytes": 1e6})
            events.promoted("tiny", {"parent": None, "metrics": {"accuracy": 0.5}})
            raise ActorGoneError("engine-7 died")
        publisher.finish(directory, runs.summary())
        return str(runtime.flow_run.id)

    return str(in_flow(work))


def test_one_artifact_of_each_kind(watched: str) -> None:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[watched])))
    by_key = {artifact.key: artifact for artifact in found}
    assert len(found) == len(by_key) == 6
    assert "report.html" in str(by_key["grpo-page"].data)
    assert by_key["grpo-progress"].data == 100
    rows = json.loads(str(by_key["grpo-metrics"].data))
    assert [row["step"] for row in rows] == ["4", "3", "2", "1"]
    assert [row["response"] for row in json.loads(str(by_key["grpo-samples"].data))] == ["answer 4"]
    assert str(by_key["grpo-reward"].data).startswith("data:image/svg+xml;base64,")
    assert "report.html](file://" in str(by_key["grpo-summary"].data)


def test_actors_lines_stand_in_the_runs_log(watched: str) -> None:
    def read() -> dict[str, int]:
        """Those of its own actor: Ray's log monitor begins with what the actors of earlier tests have said."""
        own, logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[watched])), []
        with get_client(sync_client=True) as client:
            while page := client.read_logs(log_filter=own, limit=200, offset=len(logs)):
                logs += page
        return {log.message: log.level for log in logs if log.message.startswith("[engine-7]")}

    def last_words(found: dict[str, int]) -> list[int]:
        return [number for line, number in found.items() if line.endswith("the last words")]

    lines = until(read, lambda found: "[engine-7] line 499" in found and last_words(found))
    assert last_words(lines) == [logging.ERROR]
    assert lines["[engine-7] line 499"] == logging.INFO
    assert "[engine-7] line 300" not in lines
    left_out = [int(line.split()[2]) for line in lines if "lines left out" in line]
    shown = len(lines) - len(left_out)
    assert sum(left_out) + shown == 503  # hello and the warning, the 500, the last words


def test_events_name_their_run(watched: str) -> None:
    def read() -> list[Any]:
        with get_client(sync_client=True) as client:
            chosen = EventFilter(event=EventNameFilter(name=[events.STEP_COMPLETED, events.REFIT_COMPLETED, events.PROMOTED]))
            answer = client.request("POST", "/events/filter", json={"filter": chosen.model_dump(mode="json"), "limit": 50})
        found = [event for event in answer.json()["events"] if f"prefect.flow-run.{watched}" in json.dumps(event["related"])]
        return sorted(found, key=lambda event: str(event["occurred"]))

    found = until(read, lambda all_: len(all_) == 6)
    assert [event["event"] for event in found] == [events.STEP_COMPLETED] * 4 + [events.REFIT_COMPLETED, events.PROMOTED]
    assert found[3]["resource"]["prefect.resource.id"] == f"grpo.run.{watched}"
    assert found[3]["payload"]["metrics"]["reward/mean"] == 0.4
    assert "loss" not in found[3]["payload"]["metrics"]  # JSON has no NaN
    assert found[4]["payload"] == {"step": 4, "weight_version": 4, "seconds": 0.1, "bytes": 1_000_000}
    assert found[5]["resource"]["prefect.resource.id"] == "grpo.model.tiny"


def test_the_example_automation_cancels_a_stalled_run(server: str) -> None:
    path = ROOT / "docs" / "automations" / "cancel-stalled.yaml"
    command = [sys.executable, "-m", "prefect", "automation", "create", "--from-file", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert made.returncode == 0, made.stdout + made.stderr

    def state(run: str) -> str:
        with get_client(sync_client=True) as client:
            return str(client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))[0].state_name)

    def work() -> str:
        run = str(runtime.flow_run.id)
        for waited in (30, 60):
            events.stalled(f"replay: waited {waited} s")
        time.sleep(3)
        assert state(run) == "Running"  # two are not enough
        events.stalled("replay: waited 90 s")
        return until(lambda: state(run), lambda found: found == "Cancelling")

    assert in_flow(work) == "Cancelling"


def test_a_server_that_is_away_does_not_end_the_run(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def work() -> list[str]:
        publisher = Publisher("grpo")
        publisher._log = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
        create, tries = publisher._client.create_artifact, []

        def flaky(artifact: Any) -> Any:
            tries.append(artifact.key)
            if len(tries) < 3:
                raise httpx.ConnectError("refused")
            return create(artifact)

        monkeypatch.setattr(publisher._client, "create_artifact", flaky)
        monkeypatch.setattr("tasks.publish._EVERY_S", 0.05)
        publisher.begin(1, RunDirectory.create(tmp_path, "tiny"), runs.summary(status="running"))
        publisher.update(1, runs.step_metrics(1))
        until(lambda: tries, lambda found: len(found) > 3)  # after two that fail it tries again by itself
        publisher.finish(RunDirectory.create(tmp_path, "tiny"), runs.summary())
        return tries

    said: list[str] = []
    tries = in_flow(work)
    assert tries[:4] == [*["grpo-page"] * 3, "grpo-progress"]
    assert {"grpo-page", "grpo-progress", "grpo-metrics", "grpo-reward", "grpo-summary"} == set(tries)
    assert "trying again" in said[0]
    assert said[-1].startswith("2 writes of artifacts failed")


def until[T](read: Callable[[], T], good: Callable[[T], bool]) -> T:
    """The first value that is good."""
    deadline = time.monotonic() + WAIT_S
    while not good(value := read()):
        assert time.monotonic() < deadline, value
        time.sleep(0.3)
    return value
