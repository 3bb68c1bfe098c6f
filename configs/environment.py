"""Where prompts come from, and the answers that rewards compare with."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.base import StrictModel, VariableNames
from configs.curriculum import CurriculumConfig
from configs.import_path import IMPORT_PATH
from configs.redaction import Options, Url
from configs.secrets import gather

_SOURCE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class FieldsConfig(StrictModel):
    """Where a row has its prompt and its answer; dots lead into nested fields (reward_model.ground_truth)."""

    prompt: str = Field("prompt", min_length=1, description="Text, or a chat: a list of {role, content}.")
    answer: str = Field("answer", min_length=1, description="Text or a number.")


class SourceConfig(StrictModel):
    """One source of a mixture: a data set, or a generated task."""

    name: str = Field(description="In metrics: accuracy/validation/NAME.")
    weight: PositiveFloat = Field(1.0, allow_inf_nan=False, description="Its part of the training prompts, relative to the others.")
    path: Url | None = Field(None, description="Of a data set; as `environment.path`.")
    validation_path: Url | None = None
    validation_size: PositiveInt = 128
    fields: FieldsConfig = FieldsConfig()
    task: str | None = Field(None, description="Of reasoning_gym, instead of a path.")
    task_options: dict[str, Any] = Field(default_factory=dict)
    train_size: PositiveInt = Field(100_000, description="Prompts of a task.")

    @property
    def kind(self) -> Literal["dataset", "reasoning_gym"]:
        return "dataset" if self.path else "reasoning_gym"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if not _SOURCE_NAME.fullmatch(self.name) or self.name in ("low", "high"):
            raise ValueError(f"sources: {self.name!r} is no name for a source: letters, digits, '_' and '-'; not low or high")
        if (self.path is None) == (self.task is None):
            raise ValueError(f"source {self.name!r}: set one of `path` (a data set) and `task` (of reasoning_gym)")
        if self.path is not None and self.task_options:
            raise ValueError(f"source {self.name!r}: task_options are of a `task`, and this is a data set: leave them out")
        if self.path is None and (self.validation_path or self.fields != FieldsConfig()):
            raise ValueError(f"source {self.name!r}: validation_path and fields are of a data set, and this is a task: leave them out")
        return self


class EnvironmentConfig(StrictModel):
    """A source of prompts.

    `reasoning_gym` generates tasks without end; `dataset` reads files; `python` imports a class of the user's own (see
    actors/environments/base.py). With `sources` prompts come from several of the first two.
    """

    kind: Literal["reasoning_gym", "dataset", "python"] = "reasoning_gym"
    task: str = Field("chain_sum", description="kind reasoning_gym: the generator's name (reasoning_gym.create_dataset).")
    task_options: dict[str, Any] = Field(default_factory=dict, description="kind reasoning_gym: the generator's own options.")
    curriculum: CurriculumConfig | None = Field(None, description="kind reasoning_gym: raise the difficulty with the measured accuracy.")
    path: Url | None = Field(
        None,
        description="kind dataset: a .jsonl, .json or .parquet file, a folder or glob of them, or a folder written by datasets' "
        "save_to_disk; a path or an fsspec URL.",
    )
    validation_path: Url | None = Field(None, description="kind dataset: held-out prompts; without it, the last ones of `path`.")
    fields: FieldsConfig = FieldsConfig()
    streaming: bool = Field(False, description="kind dataset: read `path` as it is drawn from, for data that memory cannot hold.")
    shuffle_buffer: PositiveInt = Field(10_000, description="Rows that a streamed data set is shuffled among.")
    sources: tuple[SourceConfig, ...] = Field((), description="A mixture; instead of path, task and import_path.")
    import_path: str | None = Field(None, description="kind python: 'package.module:Class'.")
    options: Options = Field(default_factory=dict, description="kind python: arguments of the class; values may be ${env:NAME}.")
    environment_variables: VariableNames = Field(
        (), description="kind python: names of variables that its process gets besides PATH, HOME and the like."
    )
    system_prompt: str | None = Field(None, description="Sent first when the tokenizer has a chat template and the prompt has none.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More arguments of the chat template, for example {enable_thinking: false}."
    )
    on_too_long: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="A prompt that leaves no room for a response: refuse the run at its start, drop it, or keep its last tokens. What is "
        "only seen when it is drawn (streamed, generated, after the first 20,000 rows) is dropped instead of refused, and counted.",
    )
    train_size: PositiveInt = Field(100_000, description="Prompts of one epoch (kind reasoning_gym).")
    validation_size: PositiveInt = Field(128, description="Held-out prompts; those of a generator have a seed of their own.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its sources, each once."""
        return tuple(dict.fromkeys(source.kind for source in self.sources)) or (self.kind,)

    def gathered(self, field: str) -> dict[str, str]:
        """What the references in its paths and options refer to, looked up in this process. Raises ConfigError: see `secrets.gather`."""
        sources = [{"path": source.path, "validation_path": source.validation_path} for source in self.sources]
        own = {"path": self.path, "validation_path": self.validation_path, "options": self.options, "sources": sources}
        return gather(own, field)

    @model_validator(mode="after")
    def _kind_has_its_source(self) -> Self:
        if self.sources:
            return self._mixes()
        if self.kind == "dataset" and not self.path:
            raise ValueError("kind 'dataset' needs `path`: a .jsonl or .parquet file, or a folder of them")
        if self.kind != "dataset" and (self.path or self.validation_path or self.streaming):
            raise ValueError(
                f"path, validation_path and streaming are of kind 'dataset', and kind is {self.kind!r}: "
                "set kind to dataset, or leave them out"
            )
        if self.kind == "python" and not (self.import_path and IMPORT_PATH.fullmatch(self.import_path)):
            raise ValueError("kind 'python' needs `import_path` in the form 'package.module:Class'")
        if self.curriculum is not None and self.kind == "dataset":
            raise ValueError("curriculum: the rows of a data set have no levels of difficulty: use kind reasoning_gym, or leave it out")
        if self.streaming and not self.validation_path:
            raise ValueError("streaming: the end of a stream cannot be held out: give `validation_path`")
        return self

    def _mixes(self) -> Self:
        names = [source.name for source in self.sources]
        if doubled := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"sources: two are called {doubled[0]!r}: give each a name of its own")
        given = [name for name in ("path", "validation_path", "import_path", "curriculum") if getattr(self, name)]
        given += ["task"] if self.task != type(self).model_fields["task"].default else []
        if given or self.streaming or self.task_options:
            raise ValueError(f"sources: each source has its own path or task: leave out {', '.join(given) or 'streaming and task_options'}")
        return self
