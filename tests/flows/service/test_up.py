"""What `make up` does when Ray's start fails, and that it leaves alone what lives. (The whole of it: tests/e2e/test_deployments.py.)"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from configs import settings
from configs.base import ConfigError
from flows.service import up
from flows.service.parts import Part, Process, Record
from tests.homes import prefect_home
from tests.patience import WAIT_S

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
TAKEN = "RuntimeError: Failed to start GCS. If the server startup error message is `Address already in use`, it indicates the server fails"
SHARED = "AssertionError: Session name session_2 does not match persisted value b'session_1'. Perhaps there was an error"


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


@pytest.mark.parametrize("words", [SLOW, TAKEN, SHARED], ids=["slow", "taken by a process", "taken by a cluster"])
def test_ray_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    assert start_ray(tmp_path, monkeypatch, 2, words) == 3


def test_three_slow_starts_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ray: it ended by itself(?s:.*)timed out during startup"):
        start_ray(tmp_path, monkeypatch, 3, SLOW)


def test_another_failure_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s:.*)the port is taken"):
        start_ray(tmp_path, monkeypatch, 1, "the port is taken")
    assert (tmp_path / "tries").read_text() == "1"


def test_a_process_of_ray_that_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agents' imports start short ones while `up` looks for the raylet."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    found, members = [Process(ended.pid, ended.pid, 0)], Part.members
    monkeypatch.setattr(Part, "members", lambda part: [*([found.pop()] if found else []), *members(part)])
    start_ray(tmp_path, monkeypatch, 0, "")
    assert found == []


def test_a_raylet_that_takes_longer_than_30_s_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray itself, which gives up after 30 s by default: no second start."""
    with real_ray(tmp_path, monkeypatch) as (running, record):
        raylet = stopped(record, "/raylet/raylet")
        time.sleep(35)
        raylet.resume()
        running._await_ray()


def test_agents_that_take_long_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the raylet ends where one of them is not there after 15 s."""
    with real_ray(tmp_path, monkeypatch) as (running, record):
        agents = [stopped(record, script) for script in ("/dashboard/agent.py", "/runtime_env/agent/main.py")]
        running._await_ray()
        for agent in agents:
            agent.resume()


@contextmanager
def real_ray(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[up.Up, Record]]:
    """One that is started once, and not again."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(up, "_ATTEMPTS", 1)
    monkeypatch.setattr(up, "_RAY_PORT", 0)  # any: another test may take the usual one in the same moment
    with Record.locked(home) as record:
        running = up.Up(record, home)
        try:
            running._start_ray()
            yield running, record
        finally:
            record.stop(up.RAY, signal.SIGTERM, 20)


def stopped(record: Record, program: str) -> psutil.Process:
    """The process of Ray's start whose program it is, stopped as soon as it is there."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert record.parts[up.RAY].alive(), record.log(up.RAY).read_text()
        for member in record.parts[up.RAY].members():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(member.pid)
                if any(argument.endswith(program) for argument in process.cmdline()):
                    process.suspend()
                    return process
        time.sleep(0.02)
    raise AssertionError(f"no {program}")


@pytest.mark.parametrize("name", [up.SERVER, up.REPORTS])
def test_a_port_that_was_taken_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It was free when `up` looked, and another's when the part came to it."""
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home(tmp_path / "prefect")))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with Record.locked(tmp_path) as record, socket.create_server(("127.0.0.1", 0)) as other:
        running, look = up.Up(record, tmp_path), up.Up._place
        seen = [f"127.0.0.1:{other.getsockname()[1]}"]
        monkeypatch.setattr(up.Up, "_place", lambda *given: seen.pop() if seen else look(*given))
        try:
            getattr(running, f"_start_{name}")()
            getattr(running, f"_await_{name}")()
            assert record.parts[name].alive()
        finally:
            record.stop(name, signal.SIGINT, 20)
    assert f"{name}: another process took its port in the same moment; starting it again" in capsys.readouterr().out


def test_parts_that_live_stay_as_they_are(tmp_path: Path) -> None:
    """Their words are what `up` waits for."""
    stand_in = [sys.executable, "-c", "import time; print('Ray runtime started. serving at', flush=True); time.sleep(600)"]
    with Record.locked(tmp_path) as record:
        try:
            for port, name in enumerate((up.SERVER, up.RAY, up.REPORTS), start=1):
                record.start(name, f"127.0.0.1:{port}", stand_in, settings.child_environment(), tmp_path)
            running = up.Up(record, tmp_path)
            record.start(up.WORKER, f"{running.api_url} {running.ray_address}", stand_in, settings.child_environment(), tmp_path)
            before = dict(record.parts)
            running._start_server()
            running._start_ray()
            running._await_ray()
            running._start_reports()
            assert running._look_for_worker()
            assert record.parts == before
        finally:
            for name in list(record.parts):
                record.stop(name, signal.SIGTERM, 5)
