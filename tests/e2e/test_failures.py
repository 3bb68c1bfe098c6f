"""A command that is killed leaves nothing running."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import await_none, start_command
from tests.e2e.conftest import SHORT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")  # its end is later: nobody waits for Ray's agents, see below
def killed() -> Iterator[list[str]]:
    """Marks of killed commands. Their last processes must have gone by the session's end."""
    marks: list[str] = []
    yield marks
    for mark in marks:
        await_none(mark, 120)


def test_a_killed_command_leaves_no_process(tmp_path: Path, killed: list[str]) -> None:
    mark = uuid.uuid4().hex
    command = start_command("grpo", tmp_path, mark, *SHORT, "steps=500")
    assert command.stdout is not None
    for line in command.stdout:
        if line.startswith("step 1/"):
            break
    command.kill()
    command.wait(10)
    # Ray's two agents first try for 60 s to tell a dead GCS that the raylet died (ray/_private/process_watcher.py).
    await_none(mark, 60, leaving=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))
    killed.append(mark)
