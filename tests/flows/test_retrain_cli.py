"""`python -m flows.retrain` and `flows.evaluate`: recipes, --dry-run, and that wrong input ends before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.environments.export import main as export
from actors.preflight import prepare_model
from configs.base import ConfigError
from configs.evaluate import EvaluateConfig
from configs.loader import RECIPES, dump, load, recipe_names
from configs.retrain import RetrainConfig
from flows.cli import main
from flows.evaluate import evaluate
from flows.evaluate_session import EvaluateSession
from flows.grpo import grpo
from flows.grpo_session import GrpoSession
from flows.night import Night, evaluation_config, training_config
from flows.retrain import retrain


@pytest.mark.parametrize(("root", "name"), [(EvaluateConfig, "evaluate-cpu"), (RetrainConfig, "retrain-cpu")])
def test_the_recipe_is_short_and_reads_back(root: Any, name: str, tmp_path: Path) -> None:
    assert recipe_names(root) == [name]
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) < 40
    config = load(name, ["seed=7"], root)
    path = tmp_path / "again.yaml"
    path.write_text(dump(config))
    assert load(str(path), (), root) == config


def test_a_recipe_of_another_flow_names_its_flow() -> None:
    with pytest.raises(ConfigError, match=r"'retrain-cpu' is for the flow 'retrain', not for 'grpo': run `python -m flows\.retrain`"):
        load("retrain-cpu")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("promotion.metric=loss", ["promotion.metric", "use one of accuracy, reward"]),
        ("promotion.margn=0.1", ["promotion.margn", "did you mean 'margin'"]),
        ("promotion.margin=-1", ["promotion.margin", "greater than or equal to 0"]),
        ("registry.lease_s=1", ["registry.lease_s", "greater than or equal to 3"]),
        ("registry.keep_models=0", ["registry.keep_models"]),
        ("data.url=null", ["data.url"]),
    ],
)
def test_values_that_do_not_fit_name_their_field(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("retrain-cpu", [override], RetrainConfig)
    for word in words:
        assert word in str(caught.value)


def test_dry_run_prints_configuration_and_actors_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    already = ray.is_initialized()
    assert main(retrain, Night, ["--dry-run", "seed=7", f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "seed: 7" in out
    for name in ("data plane", "engine-0", "rewards: 1 x math", "policy-worker-0", "baseline-engine-0", "model-engine-0"):
        assert name in out
    assert main(evaluate, EvaluateSession, ["--dry-run", "baseline=models/base", "generation.num_engines=2"]) == 0
    out = capsys.readouterr().out
    for line in ("baseline-engine-1", "float32: models/base", "model-engine-0", "float32: runs/latest/hf"):
        assert line in out
    assert "policy" not in out
    assert ray.is_initialized() == already
    assert not list(tmp_path.iterdir())


def refused(capsys: pytest.CaptureFixture[str], flow: Any, *arguments: str) -> str:
    """The one line on stderr of a run that was refused."""
    already = ray.is_initialized()
    assert main(flow, {retrain: Night, evaluate: EvaluateSession, grpo: GrpoSession}[flow], list(arguments)) == 2
    assert ray.is_initialized() == already
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Overrides: new prompts, a frozen set and a registry of the test's own."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "monday.jsonl").write_text(json.dumps({"prompt": "Calculate 1 + 2.", "answer": "3"}) + "\n")
    (tmp_path / "frozen.jsonl").write_text(json.dumps({"prompt": "Calculate 2 + 2.", "answer": "4"}) + "\n")
    return [f"data.url={tmp_path}/new", f"frozen_set.url={tmp_path}/frozen.jsonl", f"registry.url={tmp_path}/registry"]


def test_what_a_night_points_to_is_looked_at_first(capsys: pytest.CaptureFixture[str], places: list[str], tmp_path: Path) -> None:
    assert "data.url: nothing is at" in refused(capsys, retrain, *places, f"data.url={tmp_path}/nowhere")
    missing = "data.url: cannot reach gs://bucket/new: the package gcsfs is not installed: pip install gcsfs=="
    assert missing in refused(capsys, retrain, *places, "data.url=gs://bucket/new")
    assert "frozen_set.url: nothing is at" in refused(capsys, retrain, *places, f"frozen_set.url={tmp_path}/nowhere.jsonl")
    assert "registry.url: cannot reach nosuch://x" in refused(capsys, retrain, *places, "registry.url=nosuch://x")
    assert "no recipe 'arithmetic': did you mean 'arithmetic-cpu'" in refused(capsys, retrain, *places, "training.recipe=arithmetic")
    assert "did you mean 'steps'" in refused(capsys, retrain, *places, "training.overrides=[stesp=3]")
    with (tmp_path / "new" / "monday.jsonl").open("a") as file:
        file.write('{"prompt": "no answer"}\n')
    assert "monday.jsonl, line 2: no column 'answer'" in refused(capsys, retrain, *places)
    assert not (tmp_path / "registry").exists()


def test_evaluation_is_set_as_the_training_validates() -> None:
    config = load("retrain-cpu", ["seed=5", "training.overrides=[rollout.validation_temperature=0.3]"], RetrainConfig)
    training = training_config(config)
    found = evaluation_config(training, "old", "new")
    assert (training.environment.kind, training.environment.path, training.seed) == ("dataset", "retraining/new", 5)
    assert (found.sampling.max_new_tokens, found.sampling.temperature, found.seed) == (5, 0.3, 5)
    assert (found.models, found.generation) == ({"baseline": "old", "model": "new"}, training.generation)


def test_planned_actors_need_no_data() -> None:
    assert len(Night.planned_actors(load("retrain-cpu", (), RetrainConfig))) == 12  # each placement is one line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model as the recipe writes it."""
    return Path(prepare_model(load("arithmetic-cpu"), tmp_path / "model"))


def test_evaluate_looks_at_models_and_problems_first(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    assert f"model: there is no directory {tmp_path}/nowhere" in refused(capsys, evaluate, f"model={tmp_path}/nowhere")
    (tmp_path / "bare").mkdir()
    assert "baseline: " in refused(capsys, evaluate, f"model={model}", f"baseline={tmp_path}/bare")
    message = refused(capsys, evaluate, f"model={model}", f"problems={tmp_path}/nowhere.jsonl")
    assert "problems: cannot read" in message
    frozen = tmp_path / "frozen.jsonl"
    frozen.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in ("short", "long " * 100)))
    message = refused(capsys, evaluate, f"model={model}", f"problems={frozen}")
    assert "frozen.jsonl:2 has" in message
    assert "sampling.max_new_tokens" in message
    more = f"validation.sets={{more: {{kind: dataset, path: {frozen}, validation_path: {frozen}}}}}"
    assert "validation.sets.more: environment: prompt frozen.jsonl:2 has" in refused(capsys, evaluate, f"model={model}", more)
    assert "validation.sets.more: " in refused(capsys, grpo, more.replace(str(frozen), f"{tmp_path}/nowhere.jsonl"))
    assert "rewards.environment: kind 'environment' needs" in refused(capsys, grpo, "rewards=[{kind: environment}]")


def test_all_lines_of_a_frozen_set_are_problems(model: Path, tmp_path: Path) -> None:
    from actors.preflight import check_evaluation

    frozen = tmp_path / "frozen.jsonl"
    frozen.write_text("".join(json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(300)))
    assert check_evaluation(load("evaluate-cpu", [f"model={model}", f"problems={frozen}"], EvaluateConfig)) == 300
    assert check_evaluation(load("evaluate-cpu", [f"model={model}"], EvaluateConfig)) == 192


def test_export_writes_an_environments_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert export(["--split", "train", "--first", "3", "--count", "2", "environment.train_size=5"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sum(map(int, row["prompt"].removeprefix("Calculate ").rstrip(".").split(" + "))) for row in rows] == [
        int(row["answer"]) for row in rows
    ]
    assert export(["environment.validation_size=4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert export(["environment.tsk=x"]) == 2
    assert "did you mean 'task'" in capsys.readouterr().err
