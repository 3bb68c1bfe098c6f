"""Floating-point operations of a training step, from the model's shape and the sequence lengths alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=4)
def _shape(model_path: str) -> tuple[int, ...]:
    config = json.loads((Path(model_path) / "config.json").read_text())  # not by transformers: the policy group would import it for this
    layers, hidden, ffn, vocab = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return layers, hidden, ffn, heads * head_dim, config.get("num_key_value_heads", heads) * head_dim, vocab


def training_flops(model_path: str, sequence_lengths: Sequence[int]) -> float:
    """Forward and backward: 3 x the forward pass; each multiply-add counts 2 (PaLM, arXiv 2204.02311, appendix B).

    Attention is causal: half of length x length scores. Embedding look-ups count nothing, the output layer counts in full.
    """
    layers, hidden, ffn, query, key_value, vocab = _shape(model_path)
    per_token = layers * (hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * ffn) + hidden * vocab
    tokens = sum(sequence_lengths)
    attention = layers * sum(length * length for length in sequence_lengths) * query  # QK^T and AV, halved by causality
    return 3.0 * 2.0 * (per_token * tokens + attention)
