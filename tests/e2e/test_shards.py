"""Work in lanes: the same results as in one, errors and cancellation per shard, and nothing left behind. Prefect and Ray are real."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas import State
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.exceptions import TerminationSignal

import actors.preflight_sft
import flows.evaluate_session
import flows.sft_session
from actors import names
from actors.environments import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Part, Verdict, combine
from actors.generation.types import GenerationRequest, GenerationResult
from actors.models.scratch_model import write_scratch_model
from actors.rollout.prompts import PromptEncoder
from configs.loader import load
from configs.model import ModelConfig
from configs.rewards import ExactReward, ScoringConfig
from configs.run import RayConfig
from configs.sft import SftConfig
from flows.evaluate import evaluate
from flows.sft_session import PreparedSft, SftSession
from flows.shards import in_lanes, room
from tasks.handles import EvaluationActors
from tests.e2e.commands import task_runs
from tests.e2e.light import count

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server", "ray_session")]


def shards_of(flow_run_id: Any, wanted: set[str]) -> dict[str, str]:
    """Names and states of the task runs of the flow run's only subflow, once the wanted ones are final."""
    with get_client(sync_client=True) as client:
        parent = FlowRunFilterParentFlowRunId(any_=[flow_run_id])
        (subflow,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
    return {name: run.state_name or "" for name, run in task_runs(subflow.id, wanted).items()}


@flow(name="in-lanes")
def counting(lanes: Sequence[Sequence[int]], traces: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    assert room() > 1
    in_lanes(lanes, found.append, RayConfig(), 30, count, str(traces))
    return found


def test_a_lane_is_in_order_and_one_lane_stays_in_this_process(tmp_path: Path) -> None:
    assert room() == 1  # outside of a flow run
    assert counting([[3]], tmp_path) == [(3, os.getpid())]
    state = counting([[1, 2], [3]], tmp_path, return_state=True)
    result = state.result()
    assert [number for number, _ in result if number < 3] == [1, 2]
    assert sorted(number for number, _ in result) == [1, 2, 3]
    assert os.getpid() not in {process for _, process in result}
    every = {"count-1", "count-2", "count-3"}
    assert shards_of(state.state_details.flow_run_id, every) == dict.fromkeys(every, "Completed")


def test_the_first_failure_ends_the_rest(tmp_path: Path) -> None:
    state = counting([[8], [7, 9]], tmp_path, return_state=True)
    assert state.is_failed()
    assert "seven" in str(state.message)
    states = shards_of(state.state_details.flow_run_id, {"count-7", "count-8"})
    assert states["count-7"] == "Failed"
    assert states["count-8"] in ("Crashed", "Cancelled")
    assert "count-9" not in states
    assert not still(tmp_path)


def still(traces: Path) -> bool:
    """Whether shard 8 works on."""
    (traces / "still").unlink()
    time.sleep(0.5)
    return (traces / "still").exists()


def test_cancelling_the_flow_cancels_its_shards(tmp_path: Path) -> None:
    def cancel() -> None:
        while not (tmp_path / "still").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)  # as Prefect's worker does

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Prefect sends the signal on to whoever had it before
    thread = threading.Thread(target=cancel, daemon=True)
    thread.start()
    try:
        with pytest.raises(TerminationSignal):
            counting([[8], [1]], tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not still(tmp_path)


@dataclass(frozen=True)
class Stubs:
    """A model directory, and actors in the Ray namespace `shards` that answer for it."""

    model: Path
    actors: EvaluationActors


@pytest.fixture(scope="module")
def stubs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stubs]:
    path = tmp_path_factory.mktemp("model")
    shape = ModelConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    write_scratch_model(path, shape, ["0 + 1 = 1"], seed=0)
    tokenizer = PromptEncoder(str(path), None).tokenizer
    said = [tokenizer.encode(text, add_special_tokens=False) for text in "45"]

    # Local classes go to Ray by value: their processes import neither this module nor what it imports.
    class StubEngine:
        """The request's seed says which answer it gets."""

        def submit(self, client: str, requests: Sequence[GenerationRequest]) -> str:
            answers = [said[one.seed % 2] for one in requests]
            self.finished = [
                GenerationResult(one.request_id, ids, [0.0] * len(ids), "length", ((0, len(ids)),))
                for one, ids in zip(requests, answers, strict=True)
            ]
            return "the only one"

        def collect(self, client: str, timeout_s: float, incarnation: str) -> list[GenerationResult]:
            return self.finished

    class StubEnvironment:
        def score(self, problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
            right = [float(response.text == problem.answer) for problem, response in zip(problems, responses, strict=True)]
            return [combine({"exact": Part(value, seconds=0.5)}, [ExactReward()], ScoringConfig()) for value in right]

    start: Any = ray.remote
    engines = names.engines(2, "model")
    classes: dict[str, type] = dict.fromkeys(engines, StubEngine) | {names.ENVIRONMENT: StubEnvironment}
    handles = [start(cls).options(name=name, namespace="shards", num_cpus=0).remote() for name, cls in classes.items()]
    yield Stubs(path, EvaluationActors({"model": engines}, {}))
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def measure(stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], State[Any]]:
    """Runs `evaluate` with two engines and two sets; a prompt of the second set is too long for the model."""
    for name, size in (("own", 7), ("more", 5)):
        prompts = [f"Is {i} a number?" if (name, i) != ("more", 1) else "long " * 100 for i in range(size)]
        rows = [json.dumps({"prompt": prompt, "answer": "4"}) + "\n" for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    monkeypatch.setattr(names, "namespace", lambda run_id: "shards")
    monkeypatch.setattr(flows.evaluate_session, "launch_engines", lambda config, namespace: stubs.actors)
    more = f"{{kind: dataset, path: {tmp_path}/more.jsonl, validation_path: {tmp_path}/more.jsonl, on_too_long: drop}}"

    def run(name: str) -> State[Any]:
        overrides = [
            f"name={name}", f"model={stubs.model}", f"problems={tmp_path}/own.jsonl", f"validation.sets={{more: {more}}}",
            f"output_dir={tmp_path}", "generation.num_engines=2", "validation.samples_per_prompt=2", "sampling.temperature=1",
        ]  # fmt: skip
        return evaluate(overrides=overrides, return_state=True)

    return run


def test_an_evaluation_is_the_same_however_it_is_sharded(
    measure: Callable[[str], State[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = measure("sharded")
    monkeypatch.setattr(flows.evaluate_session, "room", lambda: 1)
    plain = measure("plain").result()
    differ = ("name", "directory", "finished_at", "seconds", "seconds_per_stage")
    assert {**sharded.result(), **dict.fromkeys(differ)} == {**plain, **dict.fromkeys(differ)}
    assert 0 < plain["accuracy_after"] < 1
    for answers, number in (("answers-model.jsonl", 2 * 7), ("answers-model-more.jsonl", 2 * 4)):
        lines = (tmp_path / "plain" / answers).read_text()
        assert len(lines.splitlines()) == number
        assert (tmp_path / "sharded" / answers).read_text() == lines
    parts = {f"evaluate-model{of_set}-{part}of2" for of_set in ("", "-more") for part in (1, 2)}
    assert shards_of(sharded.state_details.flow_run_id, parts) == dict.fromkeys(parts, "Completed")


@flow(name="preparing", validate_parameters=False)
def preparing(config: SftConfig, scratch: Path) -> PreparedSft:
    return SftSession.prepare(config, scratch)


def test_large_data_come_to_the_same_in_shards(stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i}", "response": "7" * (i if i != 13 else 500)}) + "\n" for i in range(1, 24)))
    overrides = [f"model={{path: {stubs.model}}}", f"data={{train: {path}, split: 0.2, on_too_long: drop}}", f"output_dir={tmp_path}"]
    config = load("sft-cpu", overrides, SftConfig)
    plain = SftSession.prepare(config, tmp_path)
    assert plain.data.dropped == 1
    for module in (flows.sft_session, actors.preflight_sft):
        monkeypatch.setattr(module, "PART", 4)
    monkeypatch.setattr(flows.sft_session, "room", lambda: 2)
    sharded = preparing(config, tmp_path, return_state=True)
    assert sharded.result() == plain
    measured = {"measure-train", "measure-validation"}
    assert set(shards_of(sharded.state_details.flow_run_id, measured)) == measured
