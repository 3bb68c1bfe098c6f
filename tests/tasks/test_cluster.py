"""What a run's own Ray cluster inherits from the run."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

import tasks.cluster
from configs.run import RayConfig
from tests.patience import WAIT_S

SHOW = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"


def test_a_run_in_the_background_starts_workers_that_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def init(**_: Any) -> None:
        said.append(subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=WAIT_S, check=True).stdout)

    monkeypatch.setattr(tasks.cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(tasks.cluster.ray, "init", init)
    monkeypatch.setattr(tasks.cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(tasks.cluster, "raylet", lambda: 0)
    monkeypatch.setattr(tasks.cluster.settings, "ray_address", lambda: None)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts a background command
    try:
        with tasks.cluster.cluster(RayConfig(), "test", 1, 0):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == ["False\n"]
