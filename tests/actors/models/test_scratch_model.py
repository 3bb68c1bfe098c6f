"""A model from scratch: the same bytes as transformers would write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.models.scratch_model import write_scratch_model
from configs.model import ModelConfig

WRITTEN = ("config.json", "generation_config.json", "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_what_transformers_would_begin_with(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoConfig, Qwen3ForCausalLM

    shape = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64, tie_word_embeddings=tied)
    ours = write_scratch_model(tmp_path / "ours", shape, ["1 + 1 = 2", "2 + 5 = 7"], seed=7)
    state = torch.random.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        Qwen3ForCausalLM(AutoConfig.from_pretrained(ours)).save_pretrained(tmp_path / "theirs")
    for name in WRITTEN:
        assert (ours / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    write_scratch_model(tmp_path / "again", shape, ["1 + 1 = 2", "2 + 5 = 7"], seed=7)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    assert torch.equal(torch.random.get_rng_state(), state)
