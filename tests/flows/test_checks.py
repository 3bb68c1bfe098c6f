"""`--check`: what it looks at, what it says of the cost, and that it ends where the run would."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import ray
import yaml

from actors.preflight import prepare_model
from actors.space import size
from configs.loader import RECIPES, dump, load
from configs.run import RayConfig
from flows import evaluate, grpo, retrain, sft


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert grpo.main(["--check", *arguments]) == 0
    # Of the server that other tests of this process share.
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Prefect: ")]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], str]:
    """What held, and the error."""
    capsys.readouterr()
    assert grpo.main(["--check", *arguments]) == 2
    out = capsys.readouterr()
    return out.out.splitlines(), out.err


def test_a_run_that_can_begin(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    already = ray.is_initialized()
    lines = said(capsys)
    kinds = ["output_dir", "resume", "model, data", "placement", "disk"]
    assert [line.partition(":")[0] for line in lines[:5]] == kinds
    assert "100,000 prompts to train on, 192 held out" in lines[2]
    assert lines[5].startswith("reward of 'Calculate ")
    assert lines[5].endswith(": 1 (reasoning_gym 1, right); of an empty response: 0 (reasoning_gym 0)")
    assert lines[8].startswith("time: ")
    assert "planned for" in lines[8]
    assert "170 steps: " in lines[9]
    assert lines[-2].startswith("not checked without actors: that the engine loads the model")
    assert lines[-1] == "this run can begin"
    assert ray.is_initialized() == already
    assert list(here.iterdir()) == [here / "runs"]
    assert not list((here / "runs").iterdir())


def test_what_a_teacher_s_candidates_take(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    teacher = prepare_model(load("arithmetic-cpu"), here / "teacher")
    lines = said(capsys, "preset=on-policy-distillation", f"policy.teacher.path={teacher}", "policy.teacher.top_k=4")
    held = 64 * 8 * 64 * 4 * (4 + 4)  # prompts, responses, context, candidates, bytes of an id and a log-probability
    assert f"data plane: at most {size(held)} of a teacher's candidates a step (policy.teacher.top_k)" in lines


def test_an_earlier_run_says_how_long_a_step_takes(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    for name, setting, seconds in (("before", "steps=3", 7.0), ("other", "rollout.max_new_tokens=6", 1.0)):
        run = here / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(dump(load("arithmetic-cpu", [setting])))
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time/step": seconds + step}) + "\n" for step in range(3)))
    assert "time: 8 s a step (the median of 3 steps of runs/before)" in said(capsys)


def test_a_cluster_is_not_joined_and_not_planned_for(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens there is not spoken to: a socket that answers nothing will do."""
    already, few = ray.is_initialized(), ("environment.train_size=200", "environment.validation_size=8")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listening.getsockname()[1]}")
        lines = said(capsys, *few)
        assert lines[2].startswith("Ray: 127.0.0.1:")
        assert "listens; whether it lets us in the run will see" in lines[2]
        assert "placement: is the cluster's, and was not looked at" in lines
        assert [line for line in lines if line.startswith("time: ")] == [
            "time: not estimated: what the cluster computes with was not looked at, and no earlier run in output_dir has these settings"
        ]
        run = here / "runs/before"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(dump(load("arithmetic-cpu")))
        (run / "metrics.jsonl").write_text('{"step": 1, "time/step": 36.0}\n')
        lines = said(capsys, *few)
        assert "time: 36 s a step (the median of 1 steps of runs/before)" in lines
        assert any(line.startswith("time: 170 steps: 1.7 h, the cluster's GPUs were not looked at; ") for line in lines)
    assert ray.is_initialized() == already
    assert RayConfig(address="local").joined is None  # as Ray means it: a cluster of one's own


REWARD = "def own(completions, answer):\n    return [1.0 if completions[0] == answer[0] else {other}]\n"


def recipe(here: Path, **changes: object) -> str:
    values = yaml.safe_load((RECIPES / "arithmetic-cpu.yaml").read_text()) | changes
    (here / "mine.yaml").write_text(yaml.safe_dump(values))
    return "mine.yaml"


def test_rewards_of_ones_own_are_called(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "some_rewards.py").write_text(REWARD.format(other="0.0"))
    mine = recipe(here, rewards=[{"kind": "python", "import_path": "some_rewards:own", "weight": 2, "timeout_s": 600}])
    assert any(line.endswith(": 2 (python 1, right); of an empty response: 0 (python 0)") for line in said(capsys, mine))
    (here / "other_rewards.py").write_text(REWARD.format(other="1 / 0"))
    mine = recipe(here, rewards=[{"kind": "python", "import_path": "other_rewards:own", "timeout_s": 600}])
    held, error = refused(capsys, mine)
    assert held[-1].startswith("disk: ")
    assert "rewards: of prompt" in error
    assert "ZeroDivisionError" in error


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("output_dir=file/runs", "output_dir: file/runs cannot be written: Not a directory"),
        ("resume=nowhere", "resume: nowhere holds no checkpoint"),
        ("model={path: /nowhere}", "model.path: there is no directory /nowhere"),
        ("placement=colocated", "placement colocated: 1 engine(s) of 1 GPU(s)"),
        ("ray.address=127.0.0.1:1", "ray.address: no Ray cluster answers"),
    ],
)
def test_what_the_run_would_refuse(capsys: pytest.CaptureFixture[str], here: Path, override: str, words: str) -> None:
    (here / "file").touch()
    _, error = refused(capsys, override)
    assert error.startswith("error: ")
    assert words in error


def test_the_other_flows(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    from actors.preflight import prepare_model

    assert sft.main(["--check"]) == 0
    out = capsys.readouterr().out
    assert "100,000 samples to train on, 192 held out, 0 too long" in out
    assert "time: 100 steps: " in out
    path = prepare_model(load("arithmetic-cpu"), here / "model")
    assert evaluate.main(["--check", f"model={path}"]) == 0
    assert "reward of 'Calculate " in capsys.readouterr().out
    assert retrain.main(["--check"]) == 2
    assert "retraining/" in capsys.readouterr().err


def test_a_stream(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    rows = [json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) for number in range(40)]
    (here / "train.jsonl").write_text("\n".join(rows[:30]))
    (here / "test.jsonl").write_text("\n".join(rows[30:]))
    data = {"kind": "dataset", "path": "train.jsonl", "validation_path": "test.jsonl", "streaming": True}
    lines = said(capsys, recipe(here, environment=data, rewards=[{"kind": "exact"}]))
    assert lines[2].endswith("a stream of prompts to train on, 10 held out")
    assert lines[5] == "reward of '30 + 1 =' answered by '31': 1 (exact 1, right); of an empty response: 0 (exact 0)"


def test_a_dry_run_says_what_it_did_not_look_at(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert grpo.main(["--dry-run"]) == 0
    assert "\nNot checked by --dry-run: the model's files, the data, rewards, " in capsys.readouterr().out
    assert list(here.iterdir()) == []
