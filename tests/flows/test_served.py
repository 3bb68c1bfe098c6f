"""A flow that is called from Python, as in a notebook's kernel, where no Prefect server is configured: its server ends with the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from configs import settings
from flows import evaluate, fork, grpo, replay, retrain, sft
from flows.served import Served
from tests.conftest import ROOT
from tests.e2e.commands import await_none
from tests.patience import WAIT_S

# A kernel's main thread has a running event loop. That a second call has a server of its own: tests/e2e/test_notebook.py.
KERNEL = """
import asyncio, os, signal
from flows.served import flow

@flow(name="called")
def called() -> None:
    print("called", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    called()

asyncio.run(main())
"""


def test_a_killed_kernel_leaves_no_server(tmp_path: Path) -> None:
    mark = f"served-{tmp_path.name}"
    environment = settings.child_environment(
        PREFECT_HOME=str(tmp_path), PYTHONPATH=settings.python_path(ROOT), PREFECT_API_URL="", GRPO_TEST_MARK=mark
    )
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert done.stdout.startswith("Prefect UI: http://127.0.0.1:")
    assert done.stdout.endswith("called\n")
    await_none(mark, WAIT_S)


def test_all_flows_are_served() -> None:
    for one in (grpo.grpo, sft.sft, evaluate.evaluate, retrain.retrain, fork.fork, replay.replay):
        assert isinstance(one, Served)
