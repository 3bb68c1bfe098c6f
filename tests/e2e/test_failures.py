"""A run that loses an actor ends with that actor's own error, soon, and leaves nothing running."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from actors.generation.types import EngineDiedError
from tasks.reporting.summary import Summary
from tests.e2e.commands import await_none, has_trained, start_command
from tests.e2e.conftest import SHORT, Run

pytestmark = pytest.mark.slow


def kill_when_a_step_is_done(name: str, output: Path, died: list[float]) -> threading.Thread:
    """Kills the named actor of the run that writes below `output`, once its first step stands in metrics.jsonl."""

    def work() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if has_trained(output):
                actors = ray.util.list_named_actors(all_namespaces=True)
                found = [a for a in actors if a["name"] == name and a["namespace"].startswith("grpo-")]
                ray.kill(ray.get_actor(name, namespace=found[-1]["namespace"]))
                died.append(time.monotonic())
                return
            time.sleep(0.05)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def killed() -> Iterator[list[str]]:
    """Marks of killed commands. Their last processes must have gone by the module's end."""
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


def test_a_dead_engine_ends_the_run_with_its_name(run_flow: Callable[..., Run], tmp_path: Path) -> None:
    died: list[float] = []
    thread = kill_when_a_step_is_done("engine-0", tmp_path, died)
    with pytest.raises(EngineDiedError, match="engine-0"):
        run_flow(f"output_dir={tmp_path}", "steps=500", "validate_every=500")
    ended = time.monotonic()
    thread.join(5)
    assert ended - died[0] < 60
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert summary.status == "failed"
    assert "engine-0" in str(summary.error)
    assert "engine-0" in (tmp_path / "latest" / "report.html").read_text()
    assert not [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"].startswith("grpo-")]
