"""Where prompts and rewards come from."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.base import StrictModel


class EnvironmentConfig(StrictModel):
    """A source of prompts with a verifier.

    `reasoning_gym` generates tasks without end; `jsonl` reads {"prompt", "answer"} lines, scored by math-verify;
    `python` imports a class of the user's own (see actors/environments/base.py for its four methods).
    """

    kind: Literal["reasoning_gym", "jsonl", "python"] = "reasoning_gym"
    task: str = Field("chain_sum", description="kind reasoning_gym: the generator's name (reasoning_gym.create_dataset).")
    task_options: dict[str, Any] = Field(default_factory=dict, description="kind reasoning_gym: the generator's own options.")
    answer_pattern: str | None = Field(
        None, description="kind reasoning_gym: regular expression; its last match in a response is scored, an empty answer if none."
    )
    path: str | None = Field(None, description="kind jsonl: file or fsspec URL.")
    validation_path: str | None = Field(None, description="kind jsonl: held-out file; without it, the last lines of `path`.")
    import_path: str | None = Field(None, description="kind python: 'package.module:Class'.")
    options: dict[str, Any] = Field(default_factory=dict, description="kind python: keyword arguments of the class.")
    system_prompt: str | None = Field(None, description="Sent before the question when the tokenizer has a chat template.")
    train_size: PositiveInt = Field(100_000, description="Prompts of one epoch (kind reasoning_gym).")
    validation_size: PositiveInt = Field(128, description="Held-out prompts, made with a seed of their own.")

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _kind_has_its_source(self) -> Self:
        if self.kind == "jsonl" and not self.path:
            raise ValueError('kind \'jsonl\' needs `path`: a file of {"prompt": ..., "answer": ...} lines')
        if self.kind == "python" and (not self.import_path or ":" not in self.import_path):
            raise ValueError("kind 'python' needs `import_path` in the form 'package.module:Class'")
        return self
