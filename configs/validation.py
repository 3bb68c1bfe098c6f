"""How held-out problems are answered and counted."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from configs.base import StrictModel
from configs.environment import EnvironmentConfig

OWN_SET = "validation"  # the name of the environment's own validation set
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_TAKEN = frozenset({OWN_SET, "mean", "std"})  # reward/mean and /std are of training


class ValidationConfig(StrictModel):
    """Every held-out problem is answered `samples_per_prompt` times; accuracy is the mean over problems of their fraction of right answers.

    The temperature stands where the other sampling settings do: rollout.validation_temperature, or sampling.temperature of `evaluate`.
    """

    samples_per_prompt: PositiveInt = Field(1, description="Answers to each problem; more than 1 want a temperature above 0.")
    pass_k: tuple[PositiveInt, ...] = Field((), description="The k of pass@k; default: powers of two up to samples_per_prompt.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Of the intervals around accuracies and their differences.")
    sets: dict[str, EnvironmentConfig] = Field(
        default_factory=dict, description="More validation sets by name, beside the environment's own; metrics are accuracy/NAME and so on."
    )

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k, ascending."""
        if self.pass_k:
            return tuple(sorted(set(self.pass_k)))
        return tuple(1 << power for power in range(self.samples_per_prompt.bit_length()))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ks[-1] > self.samples_per_prompt:
            raise ValueError(
                f"pass_k: pass@{self.ks[-1]} needs as many answers to a problem, and samples_per_prompt is {self.samples_per_prompt}: "
                "raise it or lower pass_k"
            )
        for name in self.sets:
            if name in _TAKEN:
                raise ValueError(f"sets: {name!r} names metrics of the run itself: choose another name")
            if not _NAME.fullmatch(name):
                raise ValueError(f"sets: {name!r} is no name: letters, digits, '_', '.' and '-', a letter first")
        return self

    def check_temperature(self, temperature: float, field: str) -> None:
        """See that several answers to a problem can differ.

        Args:
            field: where the temperature is set, for the message.

        Raises:
            ValueError: they cannot.
        """
        if self.samples_per_prompt > 1 and temperature == 0:
            raise ValueError(
                f"{field} is 0, so the {self.samples_per_prompt} answers of validation.samples_per_prompt are all the same: "
                f"set {field} above 0, or validation.samples_per_prompt to 1"
            )
