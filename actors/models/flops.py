"""Floating-point operations of a training step, from the model's shape and the sequence lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import AutoConfig


@lru_cache(maxsize=4)
def _shape(model_path: str) -> tuple[int, ...]:
    c = AutoConfig.from_pretrained(model_path)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads * head_dim,
        c.num_key_value_heads * head_dim,
        c.vocab_size,
    )


def training_flops(model_path: str, sequence_lengths: Sequence[int]) -> float:
    """Forward and backward: 3 x the forward pass; each multiply-add counts 2 (PaLM, arXiv 2204.02311, appendix B).

    Attention is causal: half of length x length scores. Embedding look-ups count nothing, the output layer counts in full.
    """
    layers, hidden, ffn, query, key_value, vocab = _shape(model_path)
    per_token = layers * (hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * ffn) + hidden * vocab
    tokens = sum(sequence_lengths)
    attention = layers * sum(length * length for length in sequence_lengths) * query  # QK^T and AV, halved by causality
    return 3.0 * 2.0 * (per_token * tokens + attention)
