"""Evaluation: the root of an `evaluate` recipe."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from configs.base import StrictModel
from configs.deadlines import Deadlines
from configs.environment import EnvironmentConfig
from configs.redaction import Url
from configs.rollout import GenerationConfig
from configs.run import BaseConfig, RayConfig, ScoredConfig
from configs.trackers import TENSORBOARD, Trackers
from configs.validation import OWN_SET

_ALL = 2**31 - 1


class SamplingConfig(StrictModel):
    """How each problem is answered, once."""

    max_new_tokens: PositiveInt = 16
    temperature: NonNegativeFloat = Field(0.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)


class EvaluateConfig(BaseConfig, ScoredConfig):
    """Everything that `evaluate` needs. With a `baseline` both models answer the same problems with the same seeds."""

    flow: Literal["evaluate"] = "evaluate"
    model: Url = Field(description="The model, as `model.path` of a run names it; a run writes one to runs/latest/hf.")
    baseline: Url | None = Field(None, description="A model to compare with.")
    problems: Url | None = Field(
        None, description="A frozen set in place of the environment's: a data set with the environment's `fields`, by path or fsspec URL."
    )
    sampling: SamplingConfig = SamplingConfig()
    generation: GenerationConfig = GenerationConfig()
    ray: RayConfig = RayConfig()
    logged_samples: PositiveInt = Field(8, description="Answers that the report shows; answers-*.jsonl holds all of them.")
    trackers: Trackers = Field(TENSORBOARD, description="Where metrics and samples go besides the run's directory: docs/trackers.md.")

    @model_validator(mode="after")
    def _validation_fits(self) -> Self:
        self.validation.check_temperature(self.sampling.temperature, "sampling.temperature")
        return self

    def prompt_room(self, context: int) -> int:
        """Most tokens of a prompt beside a response. Args: context: of the model."""
        return min(context, self.generation.max_model_len or context) - self.sampling.max_new_tokens

    @property
    def deadlines(self) -> Deadlines:
        """Of everything that a run of this configuration waits for."""
        return Deadlines(generation=self.generation.timeout_s, scoring=self.scoring.batch_timeout_s)

    @property
    def models(self) -> dict[str, str]:
        """Directories by the name they have in this run: `baseline`, when there is one, then `model`."""
        return ({"baseline": self.baseline} if self.baseline else {}) | {"model": self.model}

    @property
    def source(self) -> EnvironmentConfig:
        """Where the problems come from: the validation set of this environment."""
        if self.problems is None:
            return self.environment
        frozen = {"kind": "dataset", "path": self.problems, "validation_path": self.problems, "validation_size": _ALL}
        kept = self.environment.model_dump(include={"fields", "system_prompt", "chat_template_kwargs"})
        return EnvironmentConfig(**frozen, **kept)

    @property
    def sources(self) -> dict[str, EnvironmentConfig]:
        """Validation sets by name, the run's own first."""
        return {OWN_SET: self.source} | self.validation.sets
