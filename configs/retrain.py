"""Scheduled retraining: the root of a `retrain` recipe. URLs are paths or fsspec URLs: file://, s3://, gs://, memory://."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from configs.base import StrictModel
from configs.redaction import Override, Url
from configs.run import BaseConfig


class NewDataConfig(StrictModel):
    """Where new prompts arrive."""

    url: Url = Field(description='A folder of .jsonl files with {"prompt": ..., "answer": ...} lines; they may grow, and more may come.')
    min_prompts: PositiveInt = Field(1, description="Fewer new prompts than this are left to wait for more.")


class TrainingConfig(StrictModel):
    """How a model is trained on them: a `grpo` recipe. The source of its environment and, from the
    second night on, its model are replaced; rewards, scoring and validation are those of the recipe."""

    recipe: str
    overrides: tuple[Override, ...] = Field((), description="dotted.field=value, each on top of the recipe.")


class FrozenSetConfig(StrictModel):
    """The problems that old and new model answer. Prompts of this set are never trained on."""

    url: Url = Field(description='A .jsonl file with {"prompt": ..., "answer": ...} lines.')
    logged_samples: PositiveInt = Field(8, description="Answers of both models that the comparison shows side by side.")


class RegistryConfig(StrictModel):
    """Where promoted models and their lineage are kept."""

    url: Url
    keep_models: PositiveInt = Field(5, description="The newest promoted models whose files stay; lineage stays for ever.")
    lease_s: float = Field(120.0, ge=3, description="A run that was killed blocks the next for so long at most.")


class PromotionConfig(StrictModel):
    """When a new model takes the old one's place."""

    metric: Literal["accuracy", "reward"] = "accuracy"
    margin: NonNegativeFloat = Field(0.01, description="By how much it must be better at least; with 0, better at all.")


class ApprovalConfig(StrictModel):
    """Whether a person has the last word."""

    required: bool = False
    timeout_s: PositiveInt = Field(86400, description="How long the run waits, paused; then the old model stays.")
    poll_s: PositiveInt = Field(10, description="How often the paused run looks for the answer.")  # prefect: poll_interval


class RetrainConfig(BaseConfig):
    """Everything that `retrain` needs. `configs.loader.load` builds it from a recipe and overrides."""

    flow: Literal["retrain"] = "retrain"
    data: NewDataConfig
    training: TrainingConfig
    frozen_set: FrozenSetConfig
    registry: RegistryConfig
    promotion: PromotionConfig = PromotionConfig()
    approval: ApprovalConfig = ApprovalConfig()
