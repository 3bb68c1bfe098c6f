"""A run that has secrets everywhere: no file, no event and no parameter of it holds one, and it goes on when they have changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs import settings
from tests.e2e.conftest import Run
from tests.e2e.secretive import NOT_GIVEN, digest
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow


def holds(folder: Path, text: str) -> list[str]:
    """Files below the folder whose name or bytes hold the text."""
    found = []
    for path in folder.rglob("*"):
        try:
            inside = path.is_file() and text.encode() in path.read_bytes()
        except FileNotFoundError:
            continue  # SQLite's own, which come and go
        if inside or text in path.name:
            found.append(str(path))
    return found


def overrides(token: Path) -> list[str]:
    environment = {
        "kind": "python",
        "import_path": "tests.e2e.secretive:Sums",
        "options": {"api_key": "${env:E2E_CANARY_KEY}", "wanted": "${env:E2E_DIGEST}"},
        "validation_size": 10,
    }
    short = {
        "kind": "python",
        "weight": 0.1,
        "import_path": "tests.e2e.secretive:Short",
        "options": {"service": {"token": f"${{file:{token}}}"}, "wanted": digest(token.read_text())},
    }
    return [f"environment={json.dumps(environment)}", f"rewards={json.dumps([{'kind': 'environment'}, short])}"]


def test_no_canary_gets_out(run_flow: Callable[..., Run], server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, token, place = "canary-key-7d81aa", "canary-token-03be5f", "canary-place-c2941e"
    (tmp_path / "token").write_text(token)
    store = tmp_path / place
    for name, value in (("E2E_CANARY_KEY", key), ("E2E_CANARY_STORE", str(store)), (NOT_GIVEN, "canary-environment-99ab")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("E2E_DIGEST", digest(key))
    common = [
        *overrides(tmp_path / "token"),
        "checkpoint.url=${env:E2E_CANARY_STORE}/run",
        "checkpoint.every_steps=1",
        "warm_start.stop_at_accuracy=null",
    ]

    first = run_flow(*common, "steps=1", "validate_every=1")
    assert first.summary["status"] == "completed"
    assert (store / "run").is_dir()
    changed = "canary-key-e1d9c4"
    monkeypatch.setenv("E2E_CANARY_KEY", changed)
    monkeypatch.setenv("E2E_DIGEST", digest(changed))
    again = run_flow(*common, "steps=2", "validate_every=1")  # resume: auto; keys and places are known by their references
    assert again.summary["steps"] == 2
    assert "E2E_CANARY_KEY" in (again.directory / "config.yaml").read_text()

    home = Path(settings.get("PREFECT_HOME") or "")
    deadline = time.monotonic() + WAIT_S
    while not (holds(home, "${env:E2E_CANARY_STORE}/run") and holds(home, "grpo.step")):  # parameters; events, which come late
        assert time.monotonic() < deadline
        time.sleep(0.5)
    directories = first.directory.resolve(), again.directory.resolve(), home
    for canary in (key, changed, token, "canary-environment-99ab"):
        assert [holds(folder, canary) for folder in (*directories, store / "run")] == [[], [], [], []]
    assert [holds(folder, place) for folder in directories] == [[], [], []]  # what is stored at the place may name it: torch's index does
