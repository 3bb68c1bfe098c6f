"""Evaluation: the root of an `evaluate` recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from configs.base import StrictModel
from configs.environment import EnvironmentConfig
from configs.rollout import GenerationConfig
from configs.run import BaseConfig, RayConfig

_ALL = 2**31 - 1


class SamplingConfig(StrictModel):
    """How each problem is answered, once."""

    max_new_tokens: PositiveInt = 16
    temperature: NonNegativeFloat = Field(0.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)


class EvaluateConfig(BaseConfig):
    """Everything that `evaluate` needs. With a `baseline` both models answer the same problems with the same seeds."""

    flow: Literal["evaluate"] = "evaluate"
    model: str = Field(description="Directory of the model in Hugging Face format, as a run writes it: runs/latest/hf.")
    baseline: str | None = Field(None, description="Directory of a model to compare with.")
    problems: str | None = Field(
        None, description='A frozen set in place of the environment\'s: {"prompt", "answer"} lines, a file or fsspec URL.'
    )
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    generation: GenerationConfig = GenerationConfig()
    ray: RayConfig = RayConfig()
    logged_samples: PositiveInt = Field(8, description="Answers that the report shows; answers-*.jsonl holds all of them.")

    @property
    def models(self) -> dict[str, str]:
        """Directories by the name they have in this run: `baseline`, when there is one, then `model`."""
        return ({"baseline": self.baseline} if self.baseline else {}) | {"model": self.model}

    @property
    def source(self) -> EnvironmentConfig:
        """Where the problems come from: the validation set of this environment."""
        if self.problems is None:
            return self.environment
        frozen = {"kind": "jsonl", "path": self.problems, "validation_path": self.problems, "validation_size": _ALL}
        return EnvironmentConfig(**frozen, system_prompt=self.environment.system_prompt)
