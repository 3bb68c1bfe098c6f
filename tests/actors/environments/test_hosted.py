"""A user's environment lives in a process that has what it was given, and only plain values come out of it."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.environments import Environment, build
from actors.environments.hosted import EnvironmentEndedError, UserEnvironmentError, _Plain
from actors.rollout.prompts import LeveledProblems, PromptStream, StreamedProblems
from configs import settings
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from tests.conftest import ROOT
from tests.patience import WAIT_S

NOSY = "tests.actors.environments.nosy"


def nosy(name: str = "Nosy", **changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(kind="python", import_path=f"{NOSY}:{name}", **changes)


def test_it_sees_only_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSY_SECRET", "canary-5512")
    monkeypatch.setenv("NOSY_GIVEN", "granted")
    environment = build(nosy(environment_variables=("NOSY_GIVEN",)), 0)
    seen = environment.problem("train", 0).columns
    assert seen["environment"]["NOSY_GIVEN"] == "granted"
    assert "PATH" in seen["environment"]
    assert "canary-5512" not in str(seen)
    of_ours = {*settings.OFFLINE, *settings.RUNTIME, "RAY_AUTH_MODE"}
    assert not {name for name in seen["environment"] if name.startswith(("RAY_", "PREFECT_"))} - of_ours
    assert seen["shape"] == (1, {2, 3})


def test_nothing_of_it_is_imported_here() -> None:
    code = (
        "import os, sys; from actors.environments import build; from configs.environment import EnvironmentConfig\n"
        f"problem = build(EnvironmentConfig(kind='python', import_path='{NOSY}:Nosy'), 0).problem('train', 0)\n"
        f"raise SystemExit('{NOSY}' in sys.modules or problem.columns['pid'] == os.getpid())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)


def test_what_its_methods_raise() -> None:
    environment = build(nosy(), 0)
    with pytest.raises(IndexError, match="no problem 4"):
        environment.problem("train", 4)
    with pytest.raises(UserEnvironmentError, match="environment: problem: KeyError: 'what'"):
        environment.problem("train", 2)
    with pytest.raises(ConfigError, match=r"environment\.import_path: ValueError: not today"):
        build(nosy("Raising"), 0)


@pytest.mark.parametrize(("column", "said"), [("ours", r"holds a tests\.actors\.environments\.nosy\.Nosy"), ("lock", "cannot be sent")])
def test_other_than_plain_values_are_refused(column: str, said: str) -> None:
    environment = build(nosy(options={"column": column}), 0)
    with pytest.raises((EnvironmentEndedError, UserEnvironmentError), match=said):
        environment.problem("train", 1)
    assert environment.problem("train", 0).uid == "0"


class Attack:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def test_an_answer_runs_nothing(tmp_path: Path) -> None:
    import io

    with pytest.raises(EnvironmentEndedError):
        _Plain(io.BytesIO(pickle.dumps(("value", "", Attack(tmp_path / "mark"))))).load()
    assert not (tmp_path / "mark").exists()


def test_a_process_that_dies_is_started_again_and_one_that_dies_always_is_an_error() -> None:
    environment = build(nosy(), 0)
    pid = environment.problem("train", 0).columns["pid"]
    psutil.Process(pid).kill()
    again = environment.problem("train", 0).columns["pid"]
    assert again != pid
    with pytest.raises(EnvironmentEndedError, match=r"ended \(exit code -9\)"):
        environment.problem("train", 3)


def test_it_ends_with_its_object() -> None:
    environment: Environment | None = build(nosy(), 0)
    assert environment is not None
    pid = environment.problem("train", 0).columns["pid"]
    del environment
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_it_ends_with_the_process_that_has_it_also_in_the_middle_of_a_call() -> None:
    code = (
        "import psutil, threading, time, sys; from actors.environments import build; from configs.environment import EnvironmentConfig\n"
        f"environment = build(EnvironmentConfig(kind='python', import_path='{NOSY}:Slow'), 0)\n"
        "print(environment._host._process.pid, flush=True)\n"
        "environment.problem('train', 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.2)
        process.kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)


def test_levels_and_streams_are_what_they_were() -> None:
    leveled, streamed = build(nosy(), 0), build(nosy("Stream"), 0)
    assert isinstance(leveled, LeveledProblems)
    assert not isinstance(leveled, StreamedProblems)
    assert (leveled.levels, leveled.problem_at(2, "train", 1).uid) == (3, "1.2")
    assert isinstance(streamed, StreamedProblems)
    stream = PromptStream(streamed, 0)
    assert [problem.uid for _, problem in stream.draw(2)] == ["1", "2"]
    state = stream.state()
    stream.draw(1)
    stream.restore(state)
    assert [problem.uid for _, problem in stream.draw(1)] == ["3"]
