"""Runs whose rewards hang, die and raise: they finish, say so, and leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable

import psutil
import pytest

from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

REWARDS = (
    "[{kind: reasoning_gym}, {kind: python, name: careless, weight: 0.001, timeout_s: 0.5, import_path: 'tests.e2e.careless:reward'}, "
    "{kind: length, weight: 0.1, cache_tokens: 2}]"
)
HOSTILE = (f"rewards={REWARDS}", "scoring.on_timed_out=drop_sample", "scoring.on_failed=drop_group", "scoring.tolerance=1")


@pytest.fixture(scope="module")
def run(run_flow: Callable[..., Run]) -> Run:
    """A synchronous run: most prompts have responses without a reward."""
    return run_flow(*HOSTILE, "environment.on_too_long=drop", "validation.confidence=0.9")


def test_the_run_finishes_and_counts_what_had_no_reward(run: Run) -> None:
    rows = by_step(read_lines(run.directory / "metrics.jsonl"))
    assert run.summary["status"] == "completed"
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 3
    for row in steps:
        for label in ("reasoning_gym", "careless", "length"):
            assert {f"rewards/{label}/{name}" for name in ("timed_out", "failed", "no_opinion")} <= set(row)
        assert row["scoring/dropped"] >= row["scoring/timed_out"] + row["scoring/failed"] - 1e-9
    assert sum(row["rewards/careless/timed_out"] for row in steps) > 0
    assert sum(row["rewards/careless/failed"] for row in steps) > 0
    assert all(row["rewards/reasoning_gym/timed_out"] == row["rewards/length/failed"] == 0 for row in steps)
    assert rows[0]["accuracy/validation/low"] <= rows[0]["accuracy/validation"] <= rows[0]["accuracy/validation/high"]
    assert run.summary["timed_out"] > 0


def test_a_person_sees_which_and_why(run: Run) -> None:
    slowest = read_lines(run.directory / "slowest.jsonl")
    assert {"timed_out", "failed"} <= {line["outcome"] for line in slowest}
    assert {line["label"] for line in slowest if line["outcome"] == "timed_out"} == {"careless"}
    assert any("no value within 0.5 s" in line["error"] for line in slowest)
    assert any("its process ended" in line["error"] for line in slowest) or any(
        "ValueError: <b>no</b>" in line["error"] for line in slowest
    )
    report = (run.directory / "report.html").read_text()
    assert "careless" in report
    assert "<b>no</b>" not in report
    samples = read_lines(run.directory / "samples.jsonl")
    assert {sample["outcome"] for sample in samples} >= {"scored"}
    assert json.loads((run.directory / "summary.json").read_text())["sets"]["validation"]["gain"]


def test_no_scoring_process_is_left(run: Run) -> None:
    ours = psutil.Process().children(recursive=True)
    assert [process.pid for process in ours if "actors.environments.scoring.zygote" in " ".join(process.cmdline())] == []


def test_groups_without_a_reward_are_replaced_in_async_mode(run_flow: Callable[..., Run]) -> None:
    run = run_flow(*HOSTILE, "mode=async", "policy.loss.importance_sampling=token", "steps=2", "scoring.on_timed_out=drop_group")
    rows = by_step(read_lines(run.directory / "metrics.jsonl"))
    assert run.summary["status"] == "completed"
    assert [row["groups/trained"] for row in rows if "groups/trained" in row] == [4, 4]
    assert max(row.get("replay/failed", 0) for row in rows) > 0
    assert sum(row.get("scoring/dropped", 0) for row in rows) > 0
