"""Guards: what a training step must not look like, and what happens then."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.base import StrictModel

Action = Literal["skip", "lower_rate", "roll_back", "stop"]


class Guard(StrictModel):
    """One condition. The update of a step that meets it is not made."""

    action: Action = Field(
        "skip",
        description="skip: the step's groups are dropped; lower_rate: that, and the learning rate falls; roll_back: to the newest "
        "checkpoint, and that step is skipped should it trip again (arXiv 2204.02311, 5.1); stop: the run fails.",
    )


class Threshold(Guard):
    """A metric of the step beyond a bound."""

    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("set one of `above` and `below`")
        return self


class LogprobError(Threshold):
    """Of |engine - trainer| log-probability."""

    of: Literal["mean", "max"] = Field("mean", description="The mean over tokens, or the worst token.")


class RewardJump(Guard):
    """The step's mean reward is far from those before it."""

    deviations: PositiveFloat = Field(6.0, description="Standard deviations of the last `window` steps' mean rewards.")
    at_least: PositiveFloat = Field(0.2, description="And at least so much, in units of reward.")
    window: PositiveInt = Field(20, description="Steps; nothing is judged before there are so many.")


class GuardsConfig(StrictModel):
    """Only non_finite is on by default. Usual bounds stand beside the others."""

    non_finite: Guard = Guard()  # NaN or Inf in the loss or a gradient
    in_a_row: PositiveInt = Field(3, description="So many steps in a row that were skipped end the run.")
    factor: float = Field(0.5, gt=0, lt=1, description="lower_rate: what the learning rate is multiplied by.")
    kl: Threshold | None = None  # mean KL to the reference, nats per token; usual: above 0.1 to 1
    entropy: Threshold | None = None  # mean, nats per token; collapse: below 0.05
    logprob_error: LogprobError | None = None  # nats per token; usual: mean above 0.05, max above 10
    grad_norm: Threshold | None = None  # before clipping; usual: above 100 times that of a healthy step
    reward_jump: RewardJump | None = None

    @property
    def limits(self) -> dict[str, tuple[float | None, float | None]]:
        """(above, below) by the metric that the trainer reports."""
        named = {"kl": self.kl, "entropy": self.entropy, "grad_norm": self.grad_norm}
        if self.logprob_error is not None:
            named[f"logprob_error/{self.logprob_error.of}"] = self.logprob_error
        return {metric: (bound.above, bound.below) for metric, bound in named.items() if bound is not None}
