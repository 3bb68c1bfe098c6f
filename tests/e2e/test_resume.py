"""Runs that are interrupted go on where they were saved: killed, lost in part, asked to end, extended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.reporting.jsonl import read_lines
from tests.e2e.conftest import SHORT, Run

pytestmark = pytest.mark.slow

CLOCKS = (
    "time/", "tokens_per_s", "train_s", "tflops", "data_plane/", "scoring/slowest_s", "idle/", "replay/claim_wait_s", "checkpoint/",
)  # fmt: skip
SAVED = [*SHORT, "steps=5", "checkpoint.every_steps=2", "checkpoint.keep_last=9"]


def numbers(directory: Path) -> list[dict[str, Any]]:
    """What a run computed at each step, without what clocks say."""
    joined: dict[int, dict[str, Any]] = {}
    for row in read_lines(directory / "metrics.jsonl"):
        joined.setdefault(row["step"], {}).update({name: v for name, v in row.items() if not name.startswith(CLOCKS)})
    return [joined[step] for step in sorted(joined)]


def test_a_run_that_loses_each_of_its_actors_has_the_metrics_of_one_that_does_not(run_recorded: Callable[..., Run]) -> None:
    """Killed in turn, in steps 1 (before there is a checkpoint) to 5: the ledger, the policy, an engine, the collector, storage."""
    raise NotImplementedError
