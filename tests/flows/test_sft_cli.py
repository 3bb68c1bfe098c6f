"""`python -m flows.sft`: what --dry-run prints, and that wrong data end before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from flows.cli import main
from flows.sft import sft
from flows.sft_session import SftSession


def test_dry_run_prints_configuration_and_actors_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    already = ray.is_initialized()
    assert main(sft, SftSession, ["--dry-run", "steps=7", f"output_dir={tmp_path}", "policy.parallel.data=2"]) == 0
    out = capsys.readouterr().out
    assert "steps: 7" in out
    for name in ("data plane", "collector", "64 samples a step of environment reasoning_gym", "policy-worker-1", "DP2"):
        assert name in out
    assert "engine" not in out
    assert ray.is_initialized() == already
    assert not list(tmp_path.iterdir())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i}", "response": str(2 * i)}) + "\n" for i in range(20)))
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a run that was refused."""
    already = ray.is_initialized()
    assert main(sft, SftSession, ["data.environment=null", *arguments]) == 2
    assert ray.is_initialized() == already
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


def test_a_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, f"data.train={tmp_path}/nowhere.jsonl", "data.split=0.5")
    assert "data.train" in message
    assert "nowhere.jsonl" in message


def test_an_unknown_field(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    message = refused(capsys, f"data.train={data}", "data.split=0.5", "data.response_field=respons")
    assert "data.response_field" in message
    assert "did you mean 'response'" in message


def test_empty_data(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    data.write_text("")
    assert "is empty" in refused(capsys, f"data.train={data}", "data.split=0.5")


def test_a_sample_longer_than_the_context(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "p", "response": "7" * 100}) + "\n")
    message = refused(capsys, f"data.train={data}", f"data.validation={data}")
    assert "train sample" in message
    assert f"{data}:21: 104 tokens" in message
    assert "at most 64" in message
    assert "data.on_too_long=drop" in message


def test_nothing_that_is_short_enough(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    message = refused(capsys, f"data.train={data}", "data.split=0.5", "data.max_tokens=3", "data.on_too_long=drop")
    assert "none of 10 train samples is short enough" in message


def test_a_layout_that_does_not_divide_the_model(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    message = refused(capsys, f"data.train={data}", "data.split=0.5", "policy.parallel.tensor=4")
    assert "policy.parallel.tensor: 4 does not divide the model's num_key_value_heads (2)" in message
