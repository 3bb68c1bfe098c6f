"""The learning-rate schedule over a run's own steps, and what fits which precision."""

from __future__ import annotations

import pytest

from configs.policy import OptimizerConfig, PolicyConfig


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rounding": "stochastic"}, "'stochastic' is for dtype bfloat16; dtype is 'float32'"),
        ({"rounding": "stochastic", "dtype": "float16"}, "dtype is 'float16'"),
        ({"dtype": "float16", "loss_scale": {"initial": 2, "minimum": 4}}, r"minimum \(4\) is above initial \(2\)"),
    ],
)
def test_what_fits_no_precision_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig.model_validate(values)


def test_defaults_are_those_of_the_field() -> None:
    optimizer = OptimizerConfig()
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)
