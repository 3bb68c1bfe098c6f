"""A command that runs lets nobody in; killed, it leaves nothing running, and what it leaves on the disk goes with the next start."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.scratch import scratch
from tests.e2e.commands import await_none, processes_with, said_until, start_command
from tests.e2e.conftest import SHORT
from tests.listeners import attack, listeners, reached_from_outside
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
SEMAPHORES = Path("/dev/shm")


@pytest.fixture(scope="session")  # its end is later: nobody waits for Ray's agents, see below
def killed() -> Iterator[list[str]]:
    """Marks of killed commands. Their last processes must have gone by the session's end."""
    marks: list[str] = []
    yield marks
    for mark in marks:
        await_none(mark, 120)


def test_a_running_command_lets_nobody_in_and_a_killed_one_leaves_nothing(tmp_path: Path, temporary: Path, killed: list[str]) -> None:
    mark, before = uuid.uuid4().hex, set(SEMAPHORES.glob("*"))  # some may be of an earlier Ray that had the same number
    command = start_command("grpo", tmp_path, mark, *SHORT, "steps=500", "policy.parallel.data=2")
    said = said_until(command, "step 1/")
    assert command.poll() is None, said
    running = processes_with(mark)
    doors = listeners(list(running))
    attack(
        [f"tcp://127.0.0.1:{door.port}" for door in doors if "Controller" in door.title or "StorageUnit" in door.title], tmp_path / "ran"
    )
    outside = reached_from_outside(door.port for door in doors)
    (own,) = temporary.glob("grpo-*")
    left = f"sem.*{(own / 'raylet').read_text()}-*"
    assert own.stat().st_mode & 0o077 == 0
    assert any(own.glob("r/session_*/sockets"))
    assert len({*SEMAPHORES.glob(left)} - before) >= 20
    command.kill()
    assert {"ray::Controller", "ray::StorageUnit", "ray::Engine", "ray::PolicyWorkerActor"} <= {door.title.split(".")[0] for door in doors}
    assert list(tmp_path.glob("ran*")) == []
    # A laptop has no nodes to add, and nobody looks at Ray's dashboard.
    assert [words for words in running.values() if "/monitor.py" in words or "/dashboard.py" in words] == []
    assert {door for door in doors if not door.on_loopback} == set()
    assert outside == []
    command.wait(WAIT_S)
    # Ray's two agents first try for 60 s to tell a dead GCS that the raylet died (ray/_private/process_watcher.py).
    await_none(mark, 60, leaving=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))
    killed.append(mark)
    with scratch():  # as the next start
        assert not own.exists()
    assert {*SEMAPHORES.glob(left)} - before == set()
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
