"""The learning-rate schedule over a run's own steps."""

from __future__ import annotations

import pytest

from configs.policy import OptimizerConfig


@pytest.mark.parametrize(
    ("values", "updates", "decay_steps"),
    [
        ({"decay_style": "linear"}, 680, 680),
        ({"decay_style": "cosine", "warmup_steps": 40}, 24, 41),  # the run ends while lr still rises
        ({"decay_style": "linear", "decay_steps": 100}, 680, 100),
        ({}, 680, None),
    ],
)
def test_a_schedule_takes_the_steps_of_the_run(values: dict[str, object], updates: int, decay_steps: int | None) -> None:
    config = OptimizerConfig.model_validate(values)
    assert config.over(updates) == config.model_copy(update={"decay_steps": decay_steps})
