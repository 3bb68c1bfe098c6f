"""Supervised fine-tuning: the root of an `sft` recipe, and where its prompts and responses come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from configs.base import StrictModel
from configs.environment import EnvironmentConfig
from configs.loss import PREFERENCE, LossConfig
from configs.redaction import Url
from configs.run import BaseRunConfig
from configs.secrets import gather

FORMATS = (".jsonl", ".parquet")


class SupervisedDataConfig(StrictModel):
    """Prompts with the responses to learn: files (`train`), or the questions and answers of an `environment`."""

    train: Url | None = Field(None, description="A .jsonl or .parquet file: a path, or any fsspec URL (s3://bucket/train.parquet).")
    validation: Url | None = Field(None, description="A file of held-out samples.")
    split: float | None = Field(None, gt=0, lt=1, description="Instead of `validation`: this fraction of `train`, drawn by the seed.")
    prompt_field: str = Field("prompt", description="files: the JSON key or Parquet column of the prompt.")
    response_field: str = Field("response", description="files: the JSON key or Parquet column of the response.")
    rejected_field: str | None = Field(
        None, description="files: the key or column of a response to which that of response_field is preferred; for objective dpo."
    )
    system_prompt: str | None = Field(None, description="files: sent before the prompt when the tokenizer has a chat template.")
    environment: EnvironmentConfig | None = Field(None, description="Instead of files: see configs/environment.py.")
    max_tokens: PositiveInt | None = Field(None, description="Most tokens of prompt and response; default: what model and batching hold.")
    on_too_long: Literal["error", "drop"] = Field("error", description="What becomes of a longer sample; those dropped are counted.")

    @property
    def system(self) -> str | None:
        """The system prompt, wherever the prompts come from."""
        return self.environment.system_prompt if self.environment else self.system_prompt

    def gathered(self) -> dict[str, str]:
        """What the references in it refer to: see `EnvironmentConfig.gathered`."""
        found = gather({"train": self.train, "validation": self.validation}, "data")
        return found if self.environment is None else found | self.environment.gathered("data.environment")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.train is None) == (self.environment is None):
            raise ValueError("set one of `train` (a file) and `environment`")
        if self.environment is not None:
            of_files = ("validation", "split", "prompt_field", "response_field", "rejected_field", "system_prompt")
            if extra := [name for name in of_files if getattr(self, name) != type(self).model_fields[name].default]:
                raise ValueError(f"{', '.join(extra)}: of files only; an environment has its own (environment.system_prompt, ...)")
            return self
        if (self.validation is None) == (self.split is None):
            raise ValueError("set one of `validation` (a file) and `split` (a fraction of `train`)")
        for name, url in (("train", self.train), ("validation", self.validation)):
            if url is not None and PurePosixPath(url).suffix not in FORMATS:
                raise ValueError(f"{name}: {url!r} ends in none of {', '.join(FORMATS)}, which say the format")
        return self


class SftConfig(BaseRunConfig):
    """Everything that `sft` needs. `configs.loader.load` builds it from a recipe and overrides."""

    flow: Literal["sft"] = "sft"
    data: SupervisedDataConfig
    steps: PositiveInt | None = Field(None, description="Optimizer steps; or set `epochs`.")
    epochs: PositiveInt | None = Field(None, description="Passes over the training samples; the last batch is filled from the next pass.")
    batch_size: PositiveInt = Field(64, description="Samples of one optimizer step; with objective dpo, pairs.")
    validation_batch_size: PositiveInt | None = Field(None, description="Held-out samples of one forward pass; default: batch_size.")
    patience: PositiveInt | None = Field(None, description="Stop after this many validations without a lower loss; default: never.")

    @model_validator(mode="before")
    @classmethod
    def _saved_when_validated(cls, values: Any) -> Any:
        """`checkpoint.every_steps` is `validate_every`, where a recipe does not say otherwise."""
        checkpoint = values.get("checkpoint", {}) if isinstance(values, Mapping) else None
        if not isinstance(checkpoint, Mapping) or "every_steps" in checkpoint:
            return values
        every = values.get("validate_every", cls.model_fields["validate_every"].default)
        if not isinstance(every, int):
            return values  # its own field says what is wrong with it
        return {**values, "checkpoint": {**checkpoint, "every_steps": every}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set one of `steps` and `epochs`")
        if self.checkpoint.every_steps is not None and self.checkpoint.every_steps % self.validate_every:
            raise ValueError(
                f"checkpoint.every_steps ({self.checkpoint.every_steps}) must be a multiple of validate_every ({self.validate_every}): "
                "the best checkpoint is the one with the lowest validation loss"
            )
        dp = self.policy.parallel.data
        for name, size in (("batch_size", self.batch_size), ("validation_batch_size", self.validation_batch_size)):
            if size is not None and size % dp:
                raise ValueError(f"{name} ({size}) does not divide by policy.parallel.data ({dp})")
        loss = self.policy.loss
        if self.policy.updates_per_step != 1 or loss not in (LossConfig(), LossConfig(objective=PREFERENCE, dpo_beta=loss.dpo_beta)):
            raise ValueError(
                "policy.updates_per_step and policy.loss are of grpo: sft makes one update per batch, of its own loss or of objective dpo"
            )
        if self.policy.teacher is not None and self.policy.teacher.sources:
            raise ValueError("policy.teacher.sources is of grpo, whose prompts have sources: set policy.teacher.path")
        if (self.objective == PREFERENCE) != (self.data.rejected_field is not None):
            raise ValueError("policy.loss.objective dpo and data.rejected_field belong together: set both, or neither")
        return self

    @property
    def objective(self) -> str:
        """What its batches are trained for."""
        return PREFERENCE if self.policy.loss.objective == PREFERENCE else "sft"
