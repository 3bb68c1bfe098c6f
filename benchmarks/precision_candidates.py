"""Formulas in plain torch, which has a backward pass for each, on the engine's own inputs: which of them give its bits. Of `precision`.

    engine, token by token ── inputs of an operation ──► each candidate ──┐
                           └─ its result ────────────────── compared with ┴─► equal to the bit, or the largest relative difference

An experiment: nothing else in this project computes by these. A candidate that is equal could take the place of the trainer's operation;
where none is, the trainer would have to run the engine's kernel, with a backward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from actors.models.hf import check_model_dir, head_dim, open_weights, rope_scaling_factor
from benchmarks.precision_exact import cut
from benchmarks.precision_hooks import Key
from benchmarks.precision_replay import relative

_BLOCK = 16  # rows of a matrix product of fixed shape
Trial = tuple[Key, str, torch.Tensor, torch.Tensor]  # operation, candidate, its rows, the engine's


@dataclass(frozen=True)
class Given:
    """What the engine computed for one sequence, token by token.

    Attributes:
        operations: [tokens, width] by operation and layer. calls: tokens of each of the engine's passes: the prompt's, then one by one.
        weights: of the model, in its dtype. hf: its configuration.
    """

    operations: Mapping[Key, torch.Tensor]
    calls: list[int]
    weights: Mapping[str, torch.Tensor]
    hf: Any

    def rows(self, name: str, layer: int = 0) -> torch.Tensor:
        """[tokens, width]."""
        return self.operations[name, layer][: sum(self.calls)]

    def weight(self, *names: str, layer: int | None = None) -> torch.Tensor | None:
        """Of the layer, one below the other; None: the model has none."""
        found = [self.weights.get(name if layer is None else f"model.layers.{layer}.{name}") for name in names]
        return None if any(one is None for one in found) else torch.cat([one for one in found if one is not None])


def tried(sampled: Sequence[Mapping[str, Any]], path: str, dtype: str) -> dict[str, dict[str, dict[str, float]]]:
    """By operation and candidate: `layers`, those with all of the engine's bits (`equal`), and the largest difference (`largest`)."""
    hf, device = check_model_dir(path), "cuda" if torch.cuda.is_available() else "cpu"
    with open_weights(path) as files:
        weights = {name: file.get_tensor(name).to(device, getattr(torch, dtype)) for name, file in files.items()}
    seen: dict[tuple[str, str], dict[int, float]] = {}
    for one in sampled:
        calls = [len(one["prompt"]), *[1] * (len(one["response"]) - 1)]
        operations = {key: rows.to(device) for key, rows in one["operations"].items()}
        for (name, layer), candidate, rows, engine in _trials(Given(operations, calls, weights, hf)):
            layers = seen.setdefault((name, candidate), {})
            layers[layer] = max(layers.get(layer, 0.0), relative(rows, engine))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, candidate), layers in seen.items():
        gaps = layers.values()
        found.setdefault(name, {})[candidate] = {"layers": len(gaps), "equal": sum(gap == 0 for gap in gaps), "largest": max(gaps)}
    return found


def _trials(given: Given) -> Iterator[Trial]:
    """Of a sequence, in the order of the operations."""
    residual, before = None, given.rows("embedding")
    for layer in range(given.hf.num_hidden_layers):
        yield from _norm(given, ("norm", layer), "input_layernorm.weight", before, residual)
        residual = before if residual is None else given.rows("MLP residual", layer - 1)
        names = [f"self_attn.{kind}_proj" for kind in "qkv"]
        bias = given.weight(*[f"{name}.bias" for name in names], layer=layer)
        weight = given.weight(*[f"{name}.weight" for name in names], layer=layer)
        yield from _linear(given, ("qkv", layer), given.rows("norm", layer), weight, bias)
        yield from _rope(given, layer)
        yield from _attention(given, layer)
        weight = given.weight("self_attn.o_proj.weight", layer=layer)
        yield from _linear(given, ("attention projection", layer), given.rows("attention", layer), weight)
        before = given.rows("attention projection", layer)
        yield ("attention residual", layer), "a + b", before + residual, given.rows("attention residual", layer)
        yield from _norm(given, ("MLP norm", layer), "post_attention_layernorm.weight", before, residual)
        residual = given.rows("attention residual", layer)
        weight = given.weight("mlp.gate_proj.weight", "mlp.up_proj.weight", layer=layer)
        yield from _linear(given, ("MLP in", layer), given.rows("MLP norm", layer), weight)
        gate, up = given.rows("MLP in", layer).chunk(2, dim=1)
        yield ("activation", layer), "silu(a) b", F.silu(gate) * up, given.rows("activation", layer)
        yield from _linear(given, ("MLP", layer), given.rows("activation", layer), given.weight("mlp.down_proj.weight", layer=layer))
        before = given.rows("MLP", layer)
        yield ("MLP residual", layer), "a + b", before + residual, given.rows("MLP residual", layer)
    yield from _norm(given, ("final norm", 0), "model.norm.weight", before, residual)
    last, logits = sum(given.calls[1:]) + 1, given.operations["head", 0]
    weight = given.weight("model.embed_tokens.weight" if given.hf.tie_word_embeddings else "lm_head.weight")
    sampled = Given({("head", 0): logits[:last]}, [1] * last, given.weights, given.hf)  # an engine computes the logits of what it samples
    yield from _linear(sampled, ("head", 0), given.rows("final norm")[-last:], weight)


def _norm(given: Given, key: Key, name: str, values: torch.Tensor, residual: torch.Tensor | None) -> Iterator[Trial]:
    weight = given.weight(name, layer=None if key[0] == "final norm" else key[1])
    assert weight is not None
    epsilon, engine = given.hf.rms_norm_eps, given.rows(*key)
    rounded = values if residual is None else values + residual
    exact = values.float() if residual is None else values.float() + residual.float()
    scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
    yield key, "torch's, of the sum as stored", F.rms_norm(rounded, weight.shape, weight, epsilon), engine
    yield key, "of the float32 sum", scaled.to(weight.dtype) * weight, engine


def _linear(given: Given, key: Key, values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> Iterator[Trial]:
    assert weight is not None
    engine = given.rows(*key)[:, : len(weight)]

    def product(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, weight, bias)

    def block(rows: torch.Tensor) -> torch.Tensor:
        return product(F.pad(rows, (0, 0, 0, _BLOCK - len(rows))))[: len(rows)]

    wide = None if bias is None else bias.float()
    yield key, "all rows at once", product(values), engine
    yield key, "rows as in the engine's calls", _by(values, given.calls, product), engine
    yield key, f"blocks of {_BLOCK} rows", _by(values, _BLOCK, block), engine
    yield key, "row by row", _by(values, 1, product), engine
    yield key, "in float32, rounded once", F.linear(values.float(), weight.float(), wide).to(values.dtype), engine


def _by(values: torch.Tensor, rows: int | list[int], product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.cat([product(part) for part in values.split(rows)])


def _heads(given: Given, layer: int) -> list[torch.Tensor]:
    """Queries, keys and values as projected: [tokens, heads, size of a head] each."""
    size, groups = head_dim(given.hf), given.hf.num_key_value_heads
    rows = given.rows("qkv", layer)
    kinds = rows.split([rows.shape[1] - 2 * groups * size, groups * size, groups * size], dim=1)
    return [kind.unflatten(1, (-1, size)) for kind in kinds]


def _rope(given: Given, layer: int) -> Iterator[Trial]:
    """Rotary embeddings (Su et al. 2021), with the norms of queries and keys that Qwen3 has before them."""
    if rope_scaling_factor(given.hf) is not None:
        return
    size, base = head_dim(given.hf), float(given.hf.rope_parameters["rope_theta"])
    angles = torch.outer(torch.arange(float(sum(given.calls))), 1.0 / base ** (torch.arange(0, size, 2).float() / size))[:, None]
    angles = angles.to(given.rows("qkv", layer).device)
    for kind, values in zip(("query", "key"), _heads(given, layer), strict=False):
        key = ("rope, queries" if kind == "query" else "rope, keys", layer)
        weight = given.weight(f"self_attn.{kind[0]}_norm.weight", layer=layer)
        values = values if weight is None else F.rms_norm(values, weight.shape, weight, given.hf.rms_norm_eps)
        cos, sin, engine = angles.cos().to(values), angles.sin().to(values), given.rows(*key)
        a, b = values.chunk(2, dim=-1)
        yield key, "Megatron's: every product rounded", torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1), engine
        a, b, cos, sin = (one.float() for one in (a, b, cos, sin))
        once = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        yield key, "in float32, rounded once", once.to(values.dtype).flatten(1), engine
        yield key, "in float32, cut", cut(once, values.dtype).flatten(1), engine
        fused = torch.cat([_fma(-b, sin, a * cos), _fma(a, sin, b * cos)], -1)
        yield key, "in float32, fused multiply-add, cut", cut(fused, values.dtype).flatten(1), engine


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c of float32, rounded once, as a processor's fused multiply-add."""
    return (a.double() * b.double() + c.double()).float()


def _attention(given: Given, layer: int) -> Iterator[Trial]:
    value, size = _heads(given, layer)[2], head_dim(given.hf)
    query, key = (given.rows(f"rope, {kind}", layer).unflatten(1, (-1, size)) for kind in ("queries", "keys"))
    query, key, value = (one.transpose(0, 1) for one in (query, key, value))  # [heads, tokens, size]
    key, value = (one.repeat_interleave(len(query) // len(key), dim=0) for one in (key, value))
    tokens, engine = query.shape[1], given.rows("attention", layer)

    def plain(last: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Of the `width` queries before `last`, over the keys before it."""
        q, k, v = query[:, last - width : last].to(dtype), key[:, :last].to(dtype), value[:, :last].to(dtype)
        scores = (q @ k.transpose(1, 2)).float() * size**-0.5
        hidden = torch.ones(width, last, dtype=torch.bool, device=q.device).triu(last - width + 1)
        found: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype) @ v
        return found

    def torch_s(last: int, width: int) -> torch.Tensor:
        mask = torch.ones(width, last, dtype=torch.bool, device=query.device).tril(last - width)
        return F.scaled_dot_product_attention(query[None, :, last - width : last], key[None, :, :last], value[None, :, :last], mask)[0]

    def rows(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)

    one_by_one = range(1, tokens + 1)
    exact = rows([plain(last, 1, torch.float32) for last in one_by_one])
    yield ("attention", layer), "all queries at once", rows([plain(tokens, tokens, query.dtype)]), engine
    yield ("attention", layer), "query by query, over its prefix", rows([plain(last, 1, query.dtype) for last in one_by_one]), engine
    yield ("attention", layer), "the same in float32, rounded once", exact.to(engine.dtype), engine
    yield ("attention", layer), "the same in float32, cut", cut(exact, engine.dtype), engine
    yield ("attention", layer), "torch's fused, all queries at once", rows([torch_s(tokens, tokens)]), engine
    yield ("attention", layer), "torch's fused, query by query", rows([torch_s(last, 1) for last in one_by_one]), engine
