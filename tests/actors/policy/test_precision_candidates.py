"""Candidates of benchmarks.precision: on the inputs that transformers' models have, each gives what these models make of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.precision_candidates import tried
from benchmarks.precision_exact import cut
from tests.actors.policy import tiny

IDS = torch.tensor([[5, 17, 3, 88, 41, 9, 60]])
PROMPT = 3


def reference(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], torch.Tensor]:
    """What each operation of transformers' model gave, but for the last token, which no engine passes through."""
    module: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    model = getattr(module, f"{tiny.KINDS[kind]}ForCausalLM").from_pretrained(path, attn_implementation="eager")
    found: dict[tuple[str, int], list[torch.Tensor]] = {}

    def see(name: str, layer: int, values: torch.Tensor) -> None:
        found.setdefault((name, layer), []).append(values.detach()[0])

    def inputs(part: Any, name: str, layer: int) -> None:
        part.register_forward_pre_hook(lambda _, given: see(name, layer, given[0]))

    def outputs(part: Any, name: str, layer: int = 0) -> None:
        part.register_forward_hook(lambda _, __, out: see(name, layer, out))

    rotate, layers = module.apply_rotary_pos_emb, list(model.model.layers)

    def turn(*arguments: Any, **options: Any) -> Any:
        turned = rotate(*arguments, **options)
        layer = len(found.get(("qkv", 0), [])) and max(number for name, number in found if name == "qkv")
        for name, values in zip(("rope, queries", "rope, keys"), turned, strict=True):
            see(name, layer, values.transpose(1, 2).flatten(2))
        return turned

    monkeypatch.setattr(module, "apply_rotary_pos_emb", turn)
    outputs(model.model.embed_tokens, "embedding")
    for number, layer in enumerate(layers):
        attention, after = layer.self_attn, layers[number + 1].input_layernorm if number + 1 < len(layers) else model.model.norm
        outputs(layer.input_layernorm, "norm", number)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            outputs(part, "qkv", number)
        inputs(attention.o_proj, "attention", number)
        outputs(attention.o_proj, "attention projection", number)
        inputs(layer.post_attention_layernorm, "attention residual", number)
        outputs(layer.post_attention_layernorm, "MLP norm", number)
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            outputs(part, "MLP in", number)
        inputs(layer.mlp.down_proj, "activation", number)
        outputs(layer.mlp, "MLP", number)
        inputs(after, "MLP residual", number)
    outputs(model.model.norm, "final norm")
    outputs(model.lm_head, "head")
    with torch.no_grad():
        model(IDS[:, :-1])
    rows = {key: torch.cat(parts, dim=1) for key, parts in found.items()}
    rows["head", 0] = rows["head", 0][PROMPT - 1 :]
    return rows


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False)])
def test_each_candidate_is_the_operation(tmp_path: Path, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_model(tmp_path / "model", kind, tied=tied, num_hidden_layers=2)
    ids = IDS[0].tolist()
    given = {"prompt": ids[:PROMPT], "response": ids[PROMPT:], "operations": reference(path, kind, monkeypatch)}
    found = tried([given], str(path), "float32")
    assert set(found) == {name for name, _ in given["operations"]} - {"embedding"}
    for name, candidates in found.items():
        for candidate, row in candidates.items():
            assert row["layers"] == (1 if name in ("head", "final norm") else 2)
            assert row["largest"] < 2e-6, (name, candidate)


def test_bfloat16_is_cut_towards_zero() -> None:
    values = torch.tensor([1.0, -1.0, 1 + 127 / 2**14, -1 - 127 / 2**14, 1 + 2**-7])
    if torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM rounds here, by this CPU's instruction")
    assert cut(values, torch.bfloat16).tolist() == [1.0, -1.0, 1.0, -1.0, 1 + 2**-7]
    assert torch.equal(cut(values, torch.float32), values)
