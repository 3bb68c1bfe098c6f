"""A stage that is sent to the policy group ahead of its turn: never begun after a failure, begun once after a retry.

The flow, its tasks and the policy group are real; collector, workers and engine are the benchmark's, which compute nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from prefect import flow

import tasks.launch
from actors.data_plane import transfer_queue as queue
from actors.data_plane.interface import DataPlaneGoneError
from actors.generation.types import UpdateOptions, WeightUpdate
from actors.policy.executors import Request
from benchmarks.control_plane_flow import StubCollector, StubEngine, StubPolicyGroup, StubWorker, stubbed
from configs.run import DataPlaneConfig
from flows.grpo import grpo
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tasks.reporting.summary import Summary
from tests.e2e.commands import task_runs
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
STEPS = 3


class FailingWorker(StubWorker):
    """Fails in the reference's log-probabilities of step 2, as often as it is told."""

    error: Exception
    left = 1000

    def _run(self, request: Request) -> Any:
        in_step_2 = self._trained == 1
        if request.method == "logprob" and request.arguments[2] and in_step_2 and self.left:
            self.left -= 1
            raise self.error
        return super()._run(request)


class BrokenWorker(FailingWorker):
    error = ValueError("no such row")


class UnluckyWorker(FailingWorker):
    error, left = DataPlaneGoneError("no answer"), 1


class BrokenGroup(StubPolicyGroup):
    """The real group over workers that fail for good."""

    worker = BrokenWorker


class UnluckyGroup(StubPolicyGroup):
    """The real group over workers that fail once."""

    worker = UnluckyWorker


class MortalEngine(StubEngine):
    """Dies when it gets the second version of the weights."""

    def update_weights(self, weights: Any, version: int, options: UpdateOptions) -> WeightUpdate:
        if version == 2:
            os._exit(1)
        return super().update_weights(weights, version, options)


class EmptyCollector(StubCollector):
    """Has no prompt for the second step."""

    def _answer(self, ledger: Any, step: int) -> None:
        if step == 2:
            raise ValueError("no such prompt")
        super()._answer(ledger, step)


@flow(name="grpo")
def run_with(actors: dict[str, Any], output: Path) -> None:
    """The `grpo` flow over these actors."""
    overrides = [
        f"steps={STEPS}", f"validate_every={STEPS}", "warm_start.steps=0", "warm_start.stop_at_accuracy=null", f"output_dir={output}",
        "rollout.prompts_per_step=4", "checkpoint.every_steps=null", "recovery.restarts=0",
    ]  # fmt: skip
    with stubbed(**actors):
        grpo.fn("arithmetic-cpu", overrides)


@pytest.fixture(scope="module")
def shared_queue(ray_session: None) -> Iterator[None]:
    """The runs of this module use one data plane, one after the other: their steps write no rows. A start takes ten seconds."""
    address = queue.start("sent-ahead-data-plane", DataPlaneConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.launch, "queue", SimpleNamespace(start=lambda *_: address, stop=lambda _: None))
        yield
    queue.stop(address)


@pytest.fixture
def run(server: str, shared_queue: None, tmp_path: Path) -> Callable[..., str]:
    """Runs the flow over actors, to its end; returns its flow run's id."""

    def go(**actors: Any) -> str:
        state = run_with(actors, tmp_path, return_state=True)
        return str(state.state_details.flow_run_id)

    return go


def states(flow_run_id: str, wanted: set[str]) -> dict[str, tuple[str | None, str]]:
    """(name, message) of the task runs' states, once the wanted ones are final."""
    return {name: (run.state_name, str(run.state and run.state.message)) for name, run in task_runs(flow_run_id, wanted).items()}


def test_a_stage_that_fails_leaves_the_next_ones_unbegun(run: Callable[..., str], tmp_path: Path) -> None:
    flow_run_id = run(group=BrokenGroup)
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert summary.status == "failed"
    assert summary.error == "ValueError: no such row"
    assert (summary.steps, summary.weight_version) == (1, 1)
    names = {"logprob-2", "ref-logprob-2", "advantage-2", "train-2", "refit-2", "clear-2"}
    found = states(flow_run_id, names)
    assert {name: found[name][0] for name in names} == {
        "logprob-2": "Completed", "ref-logprob-2": "Failed", "advantage-2": "Completed",
        "train-2": "Cancelled", "refit-2": "Cancelled", "clear-2": "Completed",
    }  # fmt: skip
    assert "train of step 2 was not begun" in found["train-2"][1]
    assert "rollout-3" not in found


def test_a_dead_engine_ends_the_run_with_its_name(run: Callable[..., str], tmp_path: Path) -> None:
    flow_run_id = run(engine=MortalEngine)
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert (summary.status, summary.steps) == ("failed", 1)
    assert "EngineDiedError: refit to weight version 2: engine-0 died" in str(summary.error)
    assert "engine-0" in (tmp_path / "latest" / "report.html").read_text()
    assert summary.seconds < 60
    assert states(flow_run_id, {"train-2", "refit-2"})["refit-2"][0] == "Failed"
    deadline = time.monotonic() + WAIT_S
    while any(actor["namespace"] == f"grpo-{flow_run_id}" for actor in ray.util.list_named_actors(all_namespaces=True)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_samples_that_will_not_come_end_the_run_with_their_reason(run: Callable[..., str], tmp_path: Path) -> None:
    flow_run_id = run(collector=EmptyCollector)
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert (summary.status, summary.steps) == ("failed", 1)
    assert "the collector has given up (ValueError: no such prompt)" in str(summary.error)
    found = states(flow_run_id, {"rollout-2", "generate"})
    assert (found["rollout-2"][0], found["generate"][0]) == ("Failed", "Failed")
    assert not found.keys() & {"logprob-2", "ref-logprob-2", "advantage-2", "train-2", "refit-2", "clear-2"}


def test_after_a_retry_each_step_is_trained_once(run: Callable[..., str], tmp_path: Path) -> None:
    flow_run_id = run(group=UnluckyGroup)
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert (summary.status, summary.steps, summary.weight_version) == ("completed", STEPS, STEPS)
    rows = by_step(read_lines(tmp_path / "latest" / "metrics.jsonl"))
    assert [row["weight_version"] for row in rows[1:]] == [1, 2, 3]
    names = {f"{stage}-{step}" for stage in ("rollout", "logprob", "ref-logprob", "train", "refit", "clear") for step in (1, 2, 3)}
    assert {state for name, (state, _) in states(flow_run_id, names).items() if name in names} == {"Completed"}
