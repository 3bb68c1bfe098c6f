"""docs/tutorial.md: its files, written as they stand there, make a run that may begin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.environments import build
from actors.environments.rewards.base import Response
from actors.environments.rewards.python import PythonReward
from configs import rewards as configured
from configs.loader import load
from flows.cli import main
from flows.grpo import grpo
from flows.grpo_session import GrpoSession
from tests.conftest import ROOT


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL | re.MULTILINE))
    assert files.keys() == {"make_data.py", "my_rewards.py", "doubles.yaml"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    subprocess.run([sys.executable, "make_data.py"], check=True)
    config = load("doubles.yaml")
    GrpoSession.prepare(config, tmp_path / "model")
    problem = build(config.environment, config.seed).problem("train", 3)
    assert (problem.question, problem.answer) == ("2 x 103 =", "206")
    reward = PythonReward(configured.PythonReward(import_path="my_rewards:brief"))
    assert [reward.score(problem, Response(text, 3, False)) for text in ("206", "is 206")] == [1.0, 0.0]
    assert main(grpo, GrpoSession, ["--recipe", "doubles.yaml", "--dry-run"]) == 0
    assert "name: doubles" in capsys.readouterr().out
