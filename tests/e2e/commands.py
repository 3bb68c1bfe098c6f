"""Commands as a person types them, in processes that can be told apart by a mark in their environment."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun

from configs import settings
from tests.conftest import ROOT
from tests.disks import with_disk
from tests.homes import prefect_home
from tests.nodes import Node
from tests.patience import WAIT_S


def processes_with(mark: str) -> dict[int, str]:
    """Command lines, by pid, of the processes whose environment holds the mark."""
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found[int(environ.parent.name)] = (environ.parent / "cmdline").read_text().replace("\0", " ")[:120]
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def start_command(
    flow: str,
    output: Path,
    mark: str,
    *overrides: str,
    server: str | None = None,
    disk: tuple[Path, int] | None = None,
    node: Node | None = None,
    **variables: str,
) -> subprocess.Popen[str]:
    """The flow's command as `make` gives it, with a Ray of its own; the run writes below `output`.

    Args:
        server: URL of a Prefect server; None: one of its own.
        disk: a directory and the MiB of a disk that the command finds there (tests/disks.py). node: where it runs (tests/nodes.py).
        variables: of its environment.

    It has a fork server of its own, unless the variables name one: the forks of the tests' server do not have the mark.
    """
    command = [sys.executable, "-m", "flows.console", "run" if flow == "grpo" else flow, f"output_dir={output}", *overrides]
    own = {
        "GRPO_TEST_MARK": mark,
        "GRPO_FLOWS_FORKS": "",
        "PREFECT_HOME": str(prefect_home(output / "prefect")),
        "PREFECT_API_URL": f"{server}/api" if server else "",
    }
    command = with_disk(*disk, command) if disk else command
    return subprocess.Popen(
        node.command(command) if node else command,
        cwd=ROOT,
        env=settings.child_environment(**(own | variables)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_until(command: subprocess.Popen[str], line: str) -> str:
    """What the command prints from now on, up to a line that begins so, or to its end.

    Raises:
        AssertionError: neither came in time. The command is killed.
    """
    said: list[str] = []

    def read() -> None:
        assert command.stdout is not None
        for one in command.stdout:
            said.append(one)
            if one.startswith(line):
                return

    thread = threading.Thread(target=read, name="said_until", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    if thread.is_alive():
        command.kill()
        raise AssertionError(f"no line that begins with {line!r} within {WAIT_S:.0f} s (exit status {command.poll()}): {''.join(said)}")
    return "".join(said)


def task_runs(flow_run_id: Any, wanted: Iterable[str]) -> dict[str, TaskRun]:
    """The flow run's task runs by name, once the wanted ones are final: the server writes events down when it comes to them."""
    deadline, only = time.monotonic() + WAIT_S, FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    while True:
        with get_client(sync_client=True) as client:
            found = {run.name: run for run in client.read_task_runs(flow_run_filter=only, limit=200)}
        if all(name in found and (state := found[name].state) is not None and state.is_final() for name in wanted):
            return found
        assert time.monotonic() < deadline, (sorted(wanted), found)
        time.sleep(0.2)


def has_trained(output: Path) -> bool:
    """Whether the run that writes below `output` has done a step."""
    metrics = list(output.glob("*/metrics.jsonl"))
    return bool(metrics) and '"step": 1' in metrics[0].read_text()


def await_none(mark: str, timeout_s: float, leaving: tuple[str, ...] = ()) -> None:
    """Until no process has the mark but those named `leaving`."""
    deadline = time.monotonic() + timeout_s
    while left := [line for line in processes_with(mark).values() if not line.startswith(leaving)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
