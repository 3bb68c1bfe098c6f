"""The record of started processes: exactly these are found again and stopped, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs import settings
from configs.base import ConfigError
from flows.service.parts import Part, Record, look

# Starts a child that ignores polite signals, says so, and waits.
STUBBORN = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code])
time.sleep(600)
"""


def start(record: Record, name: str, code: str) -> Part:
    record.start(name, "127.0.0.1:1", [sys.executable, "-c", code], settings.child_environment(), Path.cwd())
    return record.parts[name]


def await_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_part_is_found_again_and_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with Record.locked(tmp_path) as record:
            start(record, "server", STUBBORN)
            await_text(record.log("server"), "child")
        with Record.locked(tmp_path) as record:  # another command, later
            part = record.parts["server"]
            assert part.alive()
            members = [process.pid for process in part.members()]
            assert len(members) == 2
            record.stop("server", signal.SIGINT, timeout_s=1)
            assert [pid for pid in members if look(pid)] == []
            assert record.parts == {}
        assert not (tmp_path / ".grpo" / "up.json").exists()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_a_dead_part_has_left_behind_is_stopped(tmp_path: Path) -> None:
    record = Record(tmp_path)
    part = None
    (tmp_path / ".grpo").mkdir()
    part = start(record, "server", STUBBORN)
    await_text(record.log("server"), "child")
    os.kill(part.pid, signal.SIGKILL)
    os.waitpid(part.pid, 0)
    assert not part.alive()
    assert len(part.members()) == 1
    part.stop(signal.SIGINT, timeout_s=0.5)
    assert part.members() == []
    part.stop(signal.SIGINT, timeout_s=0.5)  # once more does no harm


def test_a_process_that_got_the_same_number_is_left_alone() -> None:
    """A stale record: the number belongs to a later process, which leads a session, too."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        found = look(other.pid)
        assert found is not None
        stale = Part("server", other.pid, found.started - 1, "")
        assert not stale.alive()
        assert stale.members() == []
        stale.stop(signal.SIGKILL, timeout_s=0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_record_of_an_earlier_boot_is_void(tmp_path: Path) -> None:
    (tmp_path / ".grpo").mkdir()
    part = {"name": "server", "pid": 1, "started": 1, "address": ""}
    (tmp_path / ".grpo" / "up.json").write_text(json.dumps({"boot": "an earlier one", "parts": [part]}))
    assert Record(tmp_path).parts == {}


def test_one_command_at_a_time(tmp_path: Path) -> None:
    with Record.locked(tmp_path), pytest.raises(ConfigError, match="another `make up`"), Record.locked(tmp_path):
        pass


def test_a_part_that_ends_by_itself_is_named_with_its_last_words(tmp_path: Path) -> None:
    with Record.locked(tmp_path) as record:
        start(record, "ray", "raise SystemExit('no port is free')")
        with pytest.raises(ConfigError, match=r"ray: it ended by itself.*(?s:.*)no port is free"):
            record.await_true("ray", "to answer", lambda: False, timeout_s=20)


def test_a_part_that_ends_before_it_is_looked_at_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a command may have failed by the time its start returns. Whoever awaits it hears why, and may start it again."""

    class Late(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, as it is until the start returns

    monkeypatch.setattr(subprocess, "Popen", Late)
    with Record.locked(tmp_path) as record:
        part = start(record, "ray", "raise SystemExit('no port is free')")
        assert not part.alive()
        with pytest.raises(ConfigError, match=r"ray: it ended by itself.*(?s:.*)no port is free"):
            record.await_true("ray", "to answer", lambda: True, timeout_s=20)
        record.stop("ray", signal.SIGTERM, 5)
        assert record.parts == {}


def test_a_part_that_takes_too_long(tmp_path: Path) -> None:
    with Record.locked(tmp_path) as record:
        start(record, "ray", "import time; time.sleep(600)")
        try:
            with pytest.raises(ConfigError, match="ray: to answer took longer than 0 s"):
                record.await_true("ray", "to answer", lambda: False, timeout_s=0.3)
        finally:
            record.stop("ray", signal.SIGTERM, 5)


def test_interrupts_reach_a_part_that_a_background_shell_started(tmp_path: Path) -> None:
    """A shell starts `command &` with SIGINT ignored; a worker that inherits it would not end."""
    code = "import signal; print('handler', signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Record.locked(tmp_path) as record:
            start(record, "worker", code)
            await_text(record.log("worker"), "handler True")
            record.stop("worker", signal.SIGINT, 5)
    finally:
        signal.signal(signal.SIGINT, before)
