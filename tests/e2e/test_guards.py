"""What the `grpo` flow does when a guard trips: skip, go back, stop; before training and in it.

The flow, its tasks, the ledger and the policy group are real; collector, workers and engine are the benchmark's, which compute nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

import flows.grpo
from actors.data_plane.meta import KVBatchMeta
from actors.policy.executors import Request
from actors.policy.limits import FLAG, Limits, beyond, guard_of
from actors.policy.worker import PolicyWorker
from actors.rollout.transitions import Admitted
from benchmarks.control_plane_flow import StubCollector, StubPolicyGroup, StubWorker
from tasks.reporting.jsonl import read_lines
from tasks.reporting.metrics import by_step
from tasks.reporting.summary import Summary
from tests.e2e.test_sent_ahead import STEPS, run, run_with, shared_queue, states  # noqa: F401  (fixtures)

pytestmark = pytest.mark.slow


class SteepWorker(StubWorker):
    """In the second step, the gradient of the third of four updates is steep: it is not made, nor is the fourth."""

    def _run(self, request: Request) -> Any:
        found = super()._run(request)
        if request.method != "train_steps":
            return found
        plans, _, limits = request.arguments
        worker = SimpleNamespace(train=lambda plan, _, limits: self._train(plan is plans[2] and self._trained == 2, limits))
        return PolicyWorker.train_steps(cast(PolicyWorker, worker), plans, "grpo", limits)

    def _train(self, steep: bool, limits: Limits) -> dict[str, float]:
        metrics = dict.fromkeys(("loss", "logprob_error/mean"), 0.1) | {"grad_norm": 50.0 if steep else 0.1}
        return metrics | {f"{FLAG}{guard_of(metric)}": float(guard_of(metric) in beyond(metrics, limits)) for metric in limits}


class SteepGroup(StubPolicyGroup):
    """The real group over it."""

    worker = SteepWorker


class GenerousCollector(StubCollector):
    """Rewards of the third step are all high."""

    def _meta(self, place: Admitted) -> KVBatchMeta:
        meta = super()._meta(place)
        if place.version != 2:
            return meta
        return meta.model_copy(update={"tags": tuple(tag | {"reward": 5.0 + row % 2} for row, tag in enumerate(meta.tags))})


@contextmanager
def with_overrides(*overrides: str) -> Iterator[None]:
    """The flow's runs have these on top."""
    load = flows.grpo.load
    with patch.object(flows.grpo, "load", lambda recipe, given: load(recipe, [*given, *overrides])):
        yield


def ends(root: Path) -> Counter[str]:
    """How the groups of the run ended, by the journal."""
    return Counter(line["how"] for line in read_lines(root / "journal.jsonl") if line["kind"] == "ended")


def test_a_skipped_step_counts_and_its_groups_are_dropped(run: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    with with_overrides("guards.grad_norm={above: 10}"):
        run(group=SteepGroup)
    root = tmp_path / "latest"
    summary = Summary.read(root / "summary.json")
    assert (summary.status, summary.steps, summary.weight_version, summary.guards) == ("completed", STEPS, STEPS, {"grad_norm": 1})
    rows = by_step(read_lines(root / "metrics.jsonl"))
    assert [row.get("guard/grad_norm") for row in rows[1:]] == [0.0, 1.0, 0.0]
    assert [row["updates"] for row in rows[1:]] == [4.0, 2.0, 4.0]
    assert rows[-1]["replay/admitted"] == 4 * STEPS  # none in place of those that were dropped
    assert ends(root) == {"trained": 4 * STEPS - 2, "dropped/guard/grad_norm": 2}


def test_a_guard_that_stops_fails_the_run_with_its_line(run: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    with with_overrides("guards.grad_norm={above: 10, action: stop}"):
        flow_run_id = run(group=SteepGroup)
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert (summary.status, summary.steps) == ("failed", 1)
    assert summary.error == ("GuardError: guard grad_norm: step 2: grad_norm 50; no update was made (guards.grad_norm.action is stop)")
    found = ends(tmp_path / "latest")
    assert (found["trained"], found["dropped/guard/grad_norm"]) == (4 + 2, 2)
    assert "rollout-3" not in states(flow_run_id, {"train-2", "clear-2"})


def test_a_guard_that_rolls_back_is_a_loss(run: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    with with_overrides("guards.grad_norm={above: 10, action: roll_back}"):
        run(group=SteepGroup)
    summary = Summary.read(tmp_path / "latest" / "summary.json")
    assert (summary.status, summary.steps) == ("failed", 1)  # recovery.restarts is 0
    assert str(summary.error).startswith("RollBackError: guard grad_norm: step 2: grad_norm 50")


def test_a_reward_that_jumps_is_not_trained_on(run: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    with with_overrides("guards.reward_jump={window: 2}"):
        flow_run_id = run(collector=GenerousCollector)
    root = tmp_path / "latest"
    summary = Summary.read(root / "summary.json")
    assert (summary.status, summary.weight_version, summary.guards) == ("completed", STEPS, {"reward_jump": 1})
    last = by_step(read_lines(root / "metrics.jsonl"))[-1]
    assert (last["guard/reward_jump"], last["updates"], last["tokens"], last["weight_version"]) == (1.0, 0.0, 0.0, STEPS)
    assert ends(root) == {"trained": 4 * (STEPS - 1), "dropped/guard/reward_jump": 4}
    found = states(flow_run_id, {"pass-over-3", "refit-3", "clear-3"})
    assert found["pass-over-3"][0] == "Completed"
    assert "train-3" not in found
