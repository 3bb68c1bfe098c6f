"""A run that learns from two teachers alone, of which each teaches a source of its own: one response to a prompt, and steps made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.checkpoints.manifest import manifest_name
from actors.preflight import prepare_model
from configs.loader import load
from flows.replay import replay
from tasks.reporting.replay import Replayed
from tests.e2e.conftest import SHORT, Run
from tests.e2e.test_resume import numbers

pytestmark = pytest.mark.slow
SOURCE = "{name: %s, task: basic_arithmetic, task_options: {min_terms: %d, max_terms: %d, operators: ['+'], allow_parentheses: false}}"


@pytest.fixture(scope="module")
def taught(run_flow: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    environment = f"environment={{sources: [{SOURCE % ('short', 2, 2)}, {SOURCE % ('long', 3, 3)}], validation_size: 4}}"
    options = [
        environment, "preset=on-policy-distillation", "rollout.prompts_per_step=16", "rollout.responses_per_prompt=1",
        "steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=3",
    ]  # fmt: skip
    teachers = tmp_path_factory.mktemp("teachers")
    deep, wide = (
        prepare_model(load("arithmetic-cpu", [*SHORT, environment, field]), teachers / field)
        for field in ("model.num_hidden_layers=3", "model.intermediate_size=96")
    )
    return run_flow(*options, f"policy.teacher={{path: {deep}, sources: {{short: {wide}}}, top_k: 8}}")


def test_each_step_is_taught_from_the_first_on(taught: Run) -> None:
    steps = numbers(taught.directory)[1:]
    assert len(steps) == 3
    assert all(step["kl"] > 0.01 and step["grad_norm"] > 0 for step in steps)
    assert all(step["staleness/max"] == 0 for step in steps)


def test_what_teachers_said_is_kept_and_the_steps_are_made_again(taught: Run, server: str) -> None:
    """Without the checkpoint of step 2, that step is trained from what was kept of it, and step 3 is made again."""
    assert server
    (taught.directory / "checkpoints" / manifest_name(2)).unlink()
    found = Replayed.model_validate(replay(str(taught.directory), 3))
    assert found.verdict == "bit-equal"
