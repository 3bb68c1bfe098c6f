"""The FLOP formula against torch's own counter, run over a transformers model."""

from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.models.flops import training_flops


def test_forward_flops_equal_torchs_count(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        attn_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    lengths = (7, 19)
    counted = attention = 0
    for length in lengths:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long))
        # Eager attention multiplies the whole square (scores, then values); ours counts the causal half of it.
        attention += 3 * 2 * (2 * length * length * 4 * 16)
        counted += counter.get_total_flops()
    assert training_flops(str(tmp_path), lengths) == 3 * (counted - attention / 2)
