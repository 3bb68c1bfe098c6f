"""When the tasks get harder: by the accuracy that the policy has at the present level."""

from __future__ import annotations

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from configs.base import StrictModel


class CurriculumConfig(StrictModel):
    """Levels of difficulty of a reasoning_gym task, as its own curriculum defines them (reasoning_gym.factory.create_curriculum).

    A level sets the options that belong to the raised attributes, for training prompts only; all other options, and the validation prompts
    at every level, are of `task_options`.
    """

    attributes: tuple[str, ...] = Field((), description="Attributes of the task's curriculum that are raised; default: all of them.")
    raise_at: float = Field(0.8, gt=0, le=1, description="The level goes up when the accuracy over `window` groups is at least this.")
    lower_at: float | None = Field(0.2, ge=0, lt=1, description="It goes down when the accuracy is at most this; null: never.")
    window: PositiveInt = Field(64, description="Last groups of the present level over which accuracy is measured; fewer change nothing.")
    start_level: NonNegativeInt = Field(0, description="Where training begins; 0 is the easiest.")
    max_level: NonNegativeInt | None = Field(None, description="The hardest level; default: the last one that the task has.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lower_at is not None and self.lower_at >= self.raise_at:
            raise ValueError(f"lower_at must be below raise_at: {self.lower_at} is not below {self.raise_at}")
        if self.max_level is not None and self.start_level > self.max_level:
            raise ValueError(f"start_level must be at most max_level: {self.start_level} is above {self.max_level}")
        return self
