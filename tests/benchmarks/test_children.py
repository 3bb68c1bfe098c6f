"""Processes of a benchmark: their ends, and what a message says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.children import FailedError, device, lease, run


def test_a_process_is_run_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    own = os.nice(0)
    for nice, expected in ((True, min(19, own + 10)), (False, own)):
        assert run(("-c", "import os; print(os.nice(0))"), log, nice=nice) > 0
        assert int(log.read_text()) == expected


def test_a_failure_says_how_its_log_ends(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"exit code 3; .*log ends:\nwhy"):
        run(("-c", "print('why'); raise SystemExit(3)"), tmp_path / "log")


def test_a_process_is_ended_at_its_limit(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"none within 0\.5 s"):
        run(("-c", "import time; time.sleep(600)"), tmp_path / "log", limit_s=0.5)


def test_a_lease_is_named_alike_within_one() -> None:
    assert lease() == lease()
    assert lease().count("/") == 1
    assert device()
