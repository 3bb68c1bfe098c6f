"""What `make up` does when Ray's start fails. (The whole of it: tests/e2e/test_deployments.py.)"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from configs.base import ConfigError
from flows.service import up
from flows.service.parts import Record

# Fails as often as argv[2] says, in the words of argv[3]; then starts.
STAND_IN = """
import pathlib, sys, time
tries = pathlib.Path(sys.argv[1])
tries.write_text(str(int(tries.read_text()) + 1))
if int(tries.read_text()) <= int(sys.argv[2]):
    sys.exit(sys.argv[3])
print("Ray runtime started.", flush=True)
time.sleep(600)
"""
SLOW = "Exception: The current node timed out during startup. This could happen because some of the raylet failed to startup"


def start_ray(home: Path, monkeypatch: pytest.MonkeyPatch, failures: int, words: str) -> int:
    """Returns how often it was started."""
    tries = home / "tries"
    tries.write_text("0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(up, "_ray_command", lambda *_: [sys.executable, "-c", STAND_IN, str(tries), str(failures), words])
    with Record.locked(home) as record:
        running = up.Up(record, home)
        try:
            running._start_ray()
            running._await_ray()
            assert record.parts["ray"].alive()
        finally:
            record.stop("ray", signal.SIGTERM, 5)
            assert record.parts == {}
    return int(tries.read_text())


def test_ray_is_started_again_when_its_own_processes_were_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_ray(tmp_path, monkeypatch, 2, SLOW) == 3


def test_three_slow_starts_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ray: it ended by itself(?s:.*)timed out during startup"):
        start_ray(tmp_path, monkeypatch, 3, SLOW)


def test_another_failure_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s:.*)the port is taken"):
        start_ray(tmp_path, monkeypatch, 1, "the port is taken")
    assert (tmp_path / "tries").read_text() == "1"
