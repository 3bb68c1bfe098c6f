"""A synchronous run with all of DAPO, and the KL in the reward: deterministic, also after a resume; audited; and made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.checkpoints.manifest import manifest_name
from actors.rollout.audit import audit
from actors.rollout.journal import parse
from flows.replay import replay
from tasks.reporting.jsonl import read_lines
from tasks.reporting.replay import Replayed
from tests.e2e.conftest import Run
from tests.e2e.test_resume import OFTEN, numbers

pytestmark = pytest.mark.slow
OPTIONS = [
    *OFTEN, "steps=2", "preset=dapo", "rollout.max_num_gen_batches=3", "rewards=[{kind: reasoning_gym, timeout_s: 300}, {kind: length}]",
    "policy.loss.kl_coef=0.05", "policy.loss.kl_in=reward", "policy.loss.kl_estimator=k1",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(run_flow: Callable[..., Run]) -> Run:
    """A run that nothing disturbs."""
    return run_flow(*OPTIONS)


def test_a_step_draws_other_groups_under_its_weights(whole: Run) -> None:
    steps = [row for row in numbers(whole.directory) if row["step"] > 0]
    assert sum(row["groups/replaced"] for row in steps) > 0
    for row in steps:
        assert 1 <= row["groups/gen_batches"] <= 3
        assert row["groups/trained"] == 4 or row["groups/gen_batches"] == 3
        assert row["staleness/max"] == 0
        assert "rewards/length/mean" in row
    found = audit(parse((whole.directory / "journal.jsonl").read_bytes()))
    assert found.clean, found.verdict
    assert found.ends["trained"] == 8
    assert found.ends["dropped/zero_variance"] == sum(row["groups/replaced"] for row in steps)


def test_a_resumed_run_draws_the_same_and_computes_the_same(whole: Run, run_flow: Callable[..., Run]) -> None:
    where = whole.directory / "checkpoints" / manifest_name(1)
    resumed = run_flow(*OPTIONS, f"resume={where}")
    assert numbers(resumed.directory) == numbers(whole.directory)
    samples = [[row for row in read_lines(run.directory / "samples.jsonl") if row["step"] == 2] for run in (whole, resumed)]
    assert samples[0] == samples[1]


def test_the_penalty_is_in_the_advantages_and_they_are_made_again(whole: Run, server: str) -> None:
    assert server
    first, second = numbers(whole.directory)[1:]
    assert first["kl"] == first["reward/kl_penalty"] == 0  # the weights are the reference's
    assert second["kl"] != 0
    assert second["reward/kl_penalty"] != 0
    found = Replayed.model_validate(replay(str(whole.directory), 2))
    assert found.verdict == "bit-equal"
    assert {one.name for one in found.columns} == {"policy_logprobs", "generation_logprobs", "reference_logprobs", "advantages"}
    again = {one.name: one.again for one in found.metrics}
    assert again.keys() >= {"kl", "reward/kl_penalty", "groups/trained", "loss", "grad_norm"}
    assert again == {name: second[name] for name in again}
