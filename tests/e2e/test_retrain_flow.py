"""Nights on real parts: the first promotes, the second finds nothing new. And how each other end of a night looks in the UI."""

from __future__ import annotations

import contextvars
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas import State
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import EventFilter, EventNameFilter
from transformers import AutoModelForCausalLM

from configs.retrain import ApprovalConfig
from flows.approval import ask_approval
from flows.retrain import retrain
from tasks.lease import Lease
from tasks.reporting.jsonl import read_lines
from tasks.reporting.summary import Summary
from tasks.retraining.registry import Promotion, Registry
from tests.e2e.conftest import SHORT
from tests.listeners import Listener, watching
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow

# A model that has seen nothing does not say "yes"; after twenty supervised steps it does.
TRAINING = [*SHORT, "steps=1", "validate_every=1", "warm_start.lr=3e-3", "rollout.max_new_tokens=3"]


def write(path: Path, first: int, count: int) -> None:
    path.write_text("".join(json.dumps({"prompt": f"Is {i} a number?", "answer": "yes"}) + "\n" for i in range(first, first + count)))


@dataclass
class Nights:
    """Where the nights' files are, how the first and the second ended, and where processes listened during the first."""

    root: Path
    run: Callable[..., State[Any]]
    first: State[Any]
    second: State[Any]
    doors: set[Listener]

    @property
    def registry(self) -> Registry:
        return Registry(f"file://{self.root}/registry")

    @property
    def promotion(self) -> Promotion:
        found = self.registry.current()
        assert found is not None
        return found

    @property
    def directory(self) -> Path:
        return self.root / "runs" / "retrain-cpu"


@pytest.fixture(scope="module")
def nights(server: str, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Nights:
    root = tmp_path_factory.mktemp("retraining")
    (root / "new").mkdir()
    write(root / "new" / "monday.jsonl", 0, 40)
    write(root / "frozen.jsonl", 30, 20)

    def run(*overrides: str) -> State[Any]:
        where = [
            f"output_dir={root}/runs", f"data.url=file://{root}/new", f"frozen_set.url={root}/frozen.jsonl",
            f"registry.url=file://{root}/registry", f"training.overrides={json.dumps(TRAINING)}",
        ]  # fmt: skip
        return retrain(recipe="retrain-cpu", overrides=[*where, *overrides], return_state=True)

    def pids() -> list[int]:
        """This process, which trains, and all that it started: the server, Ray, and the actors of the night."""
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    with watching(pids) as doors:
        first = run()
    return Nights(root, run, first, run(), doors)


def test_the_first_night_promotes(nights: Nights) -> None:
    assert (nights.first.type.value, nights.first.name) == ("COMPLETED", "Promoted"), nights.first.message
    assert nights.first.message is not None
    assert nights.first.message.startswith("model 1: accuracy 0.0000 -> ")
    promotion = nights.promotion
    assert (promotion.number, promotion.parent, promotion.prompts) == (1, None, 30)  # ten of the forty are in the frozen set
    assert promotion.run_id == str(nights.first.state_details.flow_run_id)
    assert promotion.consumed["monday.jsonl"].size == (nights.root / "new" / "monday.jsonl").stat().st_size
    assert nights.first.result()["promoted"] == 1
    current = nights.root / "registry" / "current.json"
    assert Promotion.model_validate_json(current.read_text()) == promotion
    AutoModelForCausalLM.from_pretrained(nights.registry.fetch(promotion, nights.root / "unused"))


def test_everything_listens_on_loopback_only(nights: Nights) -> None:
    """The sockets of server and Ray, and of training and evaluation, during the night that did both."""
    assert {"ray::Controller", "ray::Engine", "ray::PolicyWorkerActor"} <= {door.title.partition(".")[0] for door in nights.doors}
    assert {door for door in nights.doors if not door.on_loopback} == set()


def test_both_models_answered_the_frozen_set(nights: Nights) -> None:
    """And the promoted directory answers as the weights in the training's engines did."""
    evaluation, training = (Summary.read(nights.directory / name / "summary.json") for name in ("evaluation", "training"))
    assert (evaluation.flow, evaluation.status) == ("evaluate", "completed")
    assert evaluation.accuracy_after == training.accuracy_after == nights.promotion.new.accuracy
    old, new = (read_lines(nights.directory / "evaluation" / f"answers-{label}.jsonl") for label in ("baseline", "model"))
    assert [row["prompt"] for row in old] == [row["prompt"] for row in new] == [f"Is {i} a number?" for i in range(30, 50)]
    for rows, accuracy in ((old, evaluation.accuracy_before), (new, evaluation.accuracy_after)):
        assert accuracy == sum(row["response"] == "yes" for row in rows) / 20
    report = (nights.directory / "evaluation" / "report.html").read_text()
    assert "<th>baseline</th>" in report
    assert "<h2>Curves</h2>" not in report


def test_the_second_night_finds_nothing_new(nights: Nights) -> None:
    assert (nights.second.type.value, nights.second.name) == ("COMPLETED", "Skipped")
    assert nights.second.message == f"nothing new under file://{nights.root}/new since model 1"
    assert sorted(path.name for path in (nights.root / "runs").iterdir()) == ["latest", "retrain-cpu"]
    assert (nights.root / "runs" / "latest" / "hf").resolve() == nights.directory / "training" / "hf"


def test_what_the_ui_shows(nights: Nights) -> None:
    run_id = nights.first.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run_id])))
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id])))
    assert sorted(run.name[: len("grpo-training-20")] for run in children) == ["evaluate-evaluat", "grpo-training-20"]
    (page,) = [str(artifact.data) for artifact in artifacts if artifact.key == "retrain-comparison"]
    assert page.startswith("## Promoted\n")
    assert "| accuracy | 0.000 |" in page
    assert page == (nights.directory / "comparison.md").read_text()


def test_the_event_carries_the_lineage(nights: Nights) -> None:
    deadline = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while True:
            query = EventFilter(event=EventNameFilter(name=["model.promoted"])).model_dump(mode="json")
            events = client._client.post("/events/filter", json={"filter": query}).json()["events"]
            found = [event for event in events if event["payload"].get("data_hash") == nights.promotion.data_hash]
            if found:
                break
            assert time.monotonic() < deadline, "no event model.promoted"
            time.sleep(0.3)
    payload = found[0]["payload"]
    assert (payload["number"], payload["parent"], payload["data_hash"]) == (1, None, nights.promotion.data_hash)
    assert payload["new"]["accuracy"] == nights.promotion.new.accuracy


def test_a_second_trigger_skips_while_one_is_at_work(nights: Nights) -> None:
    with Lease(nights.registry.lease_folder, "flow run 'the-first' is retraining into", 60).held():
        state = nights.run()
    assert (state.name, state.type.value) == ("Skipped", "COMPLETED")
    assert state.message is not None
    assert state.message.startswith("flow run 'the-first' is retraining into file://")


def test_wrong_input_is_one_clear_message(nights: Nights) -> None:
    state = nights.run(f"data.url={nights.root}/nowhere")
    assert state.is_failed()
    assert f"data.url: nothing is at {nights.root}/nowhere: check the URL" in str(state.message)
    state = nights.run("data.url=ftp://127.0.0.1:1/new")  # nothing listens there
    assert state.is_failed()
    assert "data.url: cannot reach ftp://127.0.0.1:1/new: ConnectionRefusedError: " in str(state.message)


def test_a_promoted_model_that_vanished(nights: Nights) -> None:
    weights = nights.root / "registry" / nights.promotion.model / "model.safetensors"
    moved = nights.root / "moved"
    shutil.move(weights, moved)
    try:
        state = nights.run()
    finally:
        shutil.move(moved, weights)
    assert state.is_failed()
    assert "the promoted model 1 has vanished" in str(state.message)
    assert "model.safetensors is missing: restore it, or remove" in str(state.message)
    assert nights.run().name == "Skipped"  # the lease of the failed night is free, and the promotion as it was


@flow(name="asks")
def asks(timeout_s: int) -> dict[str, Any] | None:
    answer = ask_approval("## Better by 0.1\nPromote it?", ApprovalConfig(required=True, timeout_s=timeout_s, poll_s=1))
    return None if answer is None else {"approve": answer.approve, "note": answer.note}


def paused(wanted: Callable[[FlowRun], bool]) -> FlowRun:
    """The wanted flow run, once it waits for an answer."""
    deadline = time.monotonic() + WAIT_S
    with get_client(sync_client=True) as client:
        while True:
            runs = [run for run in client.read_flow_runs() if wanted(run) and run.state and run.state.is_paused()]
            if runs:
                return runs[0]
            assert time.monotonic() < deadline, "no run has paused"
            time.sleep(0.2)


@pytest.mark.parametrize("approve", [True, False])
def test_a_person_answers_the_form(server: str, approve: bool) -> None:
    name = f"asks-{approve}"
    seen: list[str] = []

    def answer() -> None:
        run = paused(lambda run: run.name == name)
        with get_client(sync_client=True) as client:
            assert run.state is not None
            keyset = run.state.state_details.run_input_keyset
            assert keyset is not None
            seen.append(client._client.get(f"/flow_runs/{run.id}/input/{keyset['description']}").text)
            client.resume_flow_run(run.id, run_input={"approve": approve, "note": "looks right"})

    thread = threading.Thread(target=contextvars.copy_context().run, args=(answer,))  # the server's address is in the context
    thread.start()
    assert asks.with_options(flow_run_name=name)(int(WAIT_S)) == {"approve": approve, "note": "looks right"}
    thread.join(WAIT_S)
    assert "Promote it?" in seen[0]


def test_nobody_answers(server: str) -> None:
    state = asks(2, return_state=True)
    assert state.is_completed()  # no failure
    assert state.result() is None
