"""Megatron's log-probabilities and weights against transformers', for every architecture and layout."""

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.actors.policy import reference, tiny
from tests.actors.policy.conftest import LAYOUTS, MODELS

WITH_MODELS = [name for name in LAYOUTS if name != "DP2"]


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", WITH_MODELS)
def test_logprobs_equal_those_of_transformers(results: Any, models: dict[str, Path], layout: str, model: str) -> None:
    ranks = results(layout)[model]
    meta, columns = tiny.batch(5, MODELS[model].get("vocab", 96))
    ours = ranks[0]["policy_logprobs"]
    hf = reference.load(str(models[model]))
    with torch.no_grad():
        for key, ids, mask in zip(meta.keys, columns["input_ids"], columns["token_mask"], strict=True):
            assert ours[key].shape == ids.shape
            assert ours[key].dtype == torch.float32
            torch.testing.assert_close(ours[key], reference.logprobs(hf, ids, 0.8) * mask, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", WITH_MODELS)
def test_weights_come_back_bit_for_bit(results: Any, models: dict[str, Path], layout: str, model: str) -> None:
    ranks = results(layout)[model]
    assert all(rank["weights"] is None for rank in ranks[1:])
    weights, source = ranks[0]["weights"], stored(models[model])
    assert set(weights) == set(source)  # tied embeddings come once, without lm_head
    for name, tensor in source.items():
        assert torch.equal(weights[name], tensor), name
        assert weights[name].is_contiguous()


@pytest.mark.slow
def test_a_saved_policy_loads_in_transformers(results: Any, models: dict[str, Path]) -> None:
    weights = results("TP1")["save"][0]["weights"]
    source, saved = models["scratch"], models["scratch"].with_name("scratch-saved")
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.dtype == torch.float32
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert not torch.equal(state["model.norm.weight"], stored(source)["model.norm.weight"])  # it was trained
    assert AutoTokenizer.from_pretrained(saved).encode("1 + 2") == AutoTokenizer.from_pretrained(source).encode("1 + 2")
    assert filecmp.cmp(source / "tokenizer.json", saved / "tokenizer.json", shallow=False)


@pytest.mark.slow
def test_setup_says_what_was_built(results: Any, models: dict[str, Path]) -> None:
    for rank, result in enumerate(results("TP2xPP2")["llama-untied"]):
        setup = result["setup"]
        assert (setup["rank"], setup["device"], setup["optimizer"]) == (rank, "cpu", "Megatron's AdamW")
        assert setup["parameters"] == sum(tensor.numel() for tensor in stored(models["llama-untied"]).values())
