"""How nights end: worse, equal, crashed, approved, declined, unanswered.

Training and engines are stood in for: they leave the same files as the real ones, which test_retrain_flow.py runs, at once. Prefect,
registry, lease, decision and form are real.
"""

from __future__ import annotations

import contextvars
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas import State

import flows.night
from flows.retrain import retrain
from tasks.lease import Lease
from tasks.retraining.registry import Registry
from tests.e2e.test_retrain_flow import paused
from tests.patience import WAIT_S
from tests.tasks.retraining.test_registry import attempt

pytestmark = pytest.mark.slow
PROBLEMS = 10


def lines(*prompts: str) -> str:
    """Of a .jsonl file, all with one answer."""
    return "".join(json.dumps({"prompt": prompt, "answer": "7"}) + "\n" for prompt in prompts)


@dataclass
class Bench:
    """A registry with a model, a frozen set, and nights whose outcome the test chooses.

    Attributes:
        accuracies: of old and new model on the frozen set. crash: the evaluation raises.
    """

    root: Path
    accuracies: tuple[float, float] = (0.5, 0.5)
    crash: bool = False
    trained_on: list[list[str]] = field(default_factory=list)

    @property
    def registry(self) -> Registry:
        return Registry(str(self.root / "registry"))

    @property
    def promoted(self) -> int:
        found = self.registry.current()
        assert found is not None
        return found.number

    def arrive(self, name: str, *prompts: str) -> None:
        (self.root / "new" / name).write_text(lines(*prompts))

    def night(self, *overrides: str) -> State[Any]:
        where = [
            f"output_dir={self.root}/runs", f"data.url={self.root}/new", f"frozen_set.url={self.root}/frozen.jsonl",
            f"registry.url={self.root}/registry", "approval.poll_s=1",
        ]  # fmt: skip
        return retrain(recipe="retrain-cpu", overrides=[*where, *overrides], return_state=True)

    def train(self, recipe: str) -> dict[str, Any]:
        """In place of the flow `grpo`."""
        config = yaml.safe_load(Path(recipe).read_text())
        assert "warm_start" not in config or config["warm_start"]["steps"] == 0
        lines = Path(config["environment"]["path"]).read_text().splitlines()
        self.trained_on.append([json.loads(line)["prompt"] for line in lines])
        shutil.copytree(config["model"]["path"], Path(config["output_dir"]) / config["name"] / "hf")
        return {}

    def measure(self, recipe: str) -> dict[str, Any]:
        """In place of the flow `evaluate`."""
        if self.crash:
            raise RuntimeError("the engine died")
        config = yaml.safe_load(Path(recipe).read_text())
        directory = Path(config["output_dir"]) / config["name"]
        directory.mkdir()
        for label, accuracy in zip(("baseline", "model"), self.accuracies, strict=True):
            rewards = [float(number < accuracy * PROBLEMS) for number in range(PROBLEMS)]
            rows = [{"uid": f"f{i}", "prompt": f"f{i}", "answer": "7", "response": "7", "reward": paid} for i, paid in enumerate(rewards)]
            (directory / f"answers-{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        old, new = self.accuracies
        return {"accuracy_before": old, "accuracy_after": new, "reward_before": old, "reward_after": new}


@pytest.fixture
def bench(server: str, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench(tmp_path)
    model = tmp_path / "model"
    for directory in (model, tmp_path / "new"):
        directory.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "frozen.jsonl").write_text(lines(*(f"f{i}" for i in range(PROBLEMS))))
    lease = Lease(found.registry.lease_folder, "the fixture", 60)
    with lease.held():
        found.registry.promote(model, attempt(None), {}, lease, 5)
    monkeypatch.setattr(flows.night, "grpo", found.train)
    monkeypatch.setattr(flows.night, "evaluate", found.measure)
    return found


def end(state: State[Any]) -> str | None:
    assert state.type.value == "COMPLETED", state.message
    assert state.result()["outcome"] == str(state.name).lower()
    return state.name


@pytest.mark.parametrize(("new", "words"), [(0.4, "worse by 0.1000"), (0.5, "no better")])
def test_a_model_that_is_no_better_is_not_promoted(bench: Bench, new: float, words: str) -> None:
    """And not tried again with the same data; with more data, the data of the night that failed are used again."""
    bench.arrive("monday.jsonl", "a", "b")
    bench.accuracies = (0.5, new)
    state = bench.night()
    assert end(state) == "Kept"
    assert words in str(state.message)
    assert bench.promoted == 1
    again = bench.night()
    assert end(again) == "Skipped"
    assert "when the same was tried and not promoted" in str(again.message)
    bench.arrive("tuesday.jsonl", "c")
    bench.accuracies = (0.5, 0.6)
    assert end(bench.night()) == "Promoted"
    assert bench.trained_on == [["a", "b"], ["a", "b", "c"]]
    assert end(bench.night()) == "Skipped"


def test_a_crash_between_training_and_promotion(bench: Bench) -> None:
    bench.arrive("monday.jsonl", "a")
    before = bench.registry.current()
    bench.crash = True
    state = bench.night()
    assert state.is_failed()
    assert "the engine died" in str(state.message)
    assert bench.registry.current() == before
    bench.crash, bench.accuracies = False, (0.5, 0.9)
    assert end(bench.night()) == "Promoted"
    assert bench.promoted == 2
    assert bench.trained_on == [["a"], ["a"]]


def test_too_few_new_prompts_wait_for_more(bench: Bench) -> None:
    bench.arrive("monday.jsonl", "a")
    state = bench.night("data.min_prompts=2")
    assert end(state) == "Skipped"
    assert "1 new prompts under" in str(state.message)
    assert not (bench.root / "runs").exists()


def answering(bench: Bench, ask: Callable[[], State[Any]], **answer: Any) -> State[Any]:
    """Run a night, and fill in the form when it waits."""

    def work() -> None:
        run = paused(lambda run: run.name.startswith("retrain-"))
        with get_client(sync_client=True) as client:
            client.resume_flow_run(run.id, run_input=answer)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))  # the server's address is in the context
    thread.start()
    state = ask()
    thread.join(60)
    return state


def test_a_person_has_the_last_word(bench: Bench) -> None:
    bench.arrive("monday.jsonl", "a")
    bench.accuracies = (0.5, 0.9)
    required = ["approval.required=true", f"approval.timeout_s={WAIT_S:.0f}"]
    declined = answering(bench, lambda: bench.night(*required), approve=False, note="too curt")
    assert end(declined) == "Kept"
    assert str(declined.message).endswith("declined by a person: too curt")
    assert (bench.root / "runs" / "latest" / "comparison.md").read_text().startswith("## Kept the old model\n")
    assert end(bench.night(*required)) == "Skipped"
    bench.arrive("tuesday.jsonl", "b")
    unanswered = bench.night("approval.required=true", "approval.timeout_s=2")
    assert end(unanswered) == "Kept"
    assert "nobody approved it within 2 s" in str(unanswered.message)
    # Nobody has declined: the next night asks again.
    approved = answering(bench, lambda: bench.night(*required), approve=True, note="good")
    assert end(approved) == "Promoted"
    found = bench.registry.current()
    assert found is not None
    assert (found.number, found.parent) == (2, 1)
    assert (bench.root / "runs" / "latest" / "comparison.md").read_text().startswith("## Promoted\n")
    assert found.reason.endswith("approved by a person: good")
    assert set(found.consumed) == {"monday.jsonl", "tuesday.jsonl"}
