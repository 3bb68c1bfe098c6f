"""Hooks on vLLM's and Megatron's modules that record the same operations under the same names, as rows of tokens. Of `precision`.

embedding ─► layer: norm ─► qkv ─► rope (after the norms of q and k, where there are some) ─► attention ─► attention projection
                    ─► attention residual ─► MLP norm ─► MLP in ─► activation ─► MLP ─► MLP residual ─► next layer ...
                    ─► final norm ─► head (logits)

A recorder that follows another side's record gives every operation that side's inputs: what an operation made is recorded, and then
overwritten with what the other side made, from which all further operations go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

Key = tuple[str, int]  # operation, layer
Order = Callable[[torch.Tensor], torch.Tensor]


class Recorder:
    """Copies of what operations gave: calls one after the other are further rows of the same sequence."""

    def __init__(self) -> None:
        self._parts: dict[Key, list[torch.Tensor]] = {}
        self._given: Mapping[Key, torch.Tensor] = {}

    def clear(self, follow: Mapping[Key, torch.Tensor] | None = None) -> None:
        """For the next sequence.

        Args:
            follow: `rows` of another side, whose results are to take the place of this one's; None: nothing is changed.
        """
        self._parts.clear()
        self._given = follow or {}

    def add(self, name: str, layer: int, values: torch.Tensor, order: Order | None = None, back: Order | None = None) -> None:
        """What one call gave: Megatron's [tokens, 1, ...] or [tokens, ...]. Overwritten in place where another side is followed.

        Args:
            order: from [tokens, width] to the order that both sides have; back: its inverse.
        """
        rows = _tokens(values).detach()
        parts = self._parts.setdefault((name, layer), [])
        begin = sum(map(len, parts))
        ordered = rows if order is None else order(rows)
        parts.append(ordered.to("cpu", copy=True))
        given = self._given.get((name, layer))
        if given is None:
            return
        given = given[begin : begin + len(rows)].to(rows)
        mine = ordered.clone()
        mine[: len(given), : given.shape[1]] = given  # the trainer's rows go on, and its logits have columns of padding
        values.copy_((mine if back is None else back(mine)).view(values.shape))

    def largest_call(self, name: str) -> torch.Tensor:
        """[tokens, width] of an operation outside the layers: of the call with the most tokens."""
        return max(self._parts[name, 0], key=len)

    def rows(self) -> dict[Key, torch.Tensor]:
        """By operation and layer, in the order of their first calls: [all tokens, width]."""
        return {key: torch.cat(parts) for key, parts in self._parts.items()}


def of_engine(model: Any, recorder: Recorder) -> None:
    """On a Llama, Qwen2 or Qwen3 of vLLM; its rows are [tokens, width]."""

    def outputs(module: Any, name: str, layer: int = 0) -> None:
        module.register_forward_hook(lambda _, __, out: recorder.add(name, layer, _first(out)))

    def inputs(module: Any, see: Callable[[tuple[Any, ...]], None]) -> None:
        module.register_forward_pre_hook(lambda _, given: see(given))

    def norm(module: Any, name: str, layer: int, residual: Key | None) -> None:
        """vLLM's norms add what came before to the residual stream first, and give both."""

        def record(_: Any, __: Any, out: Any) -> None:
            if isinstance(out, tuple) and residual is not None:
                recorder.add(*residual, out[1])
            recorder.add(name, layer, _first(out))

        module.register_forward_hook(record)

    outputs(model.model.embed_tokens, "embedding")
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        norm(layer.input_layernorm, "norm", number, ("MLP residual", number - 1))
        outputs(attention.qkv_proj, "qkv", number)
        inputs(attention.attn, functools.partial(_rope, recorder, number))
        outputs(attention.attn, "attention", number)
        outputs(attention.o_proj, "attention projection", number)
        norm(layer.post_attention_layernorm, "MLP norm", number, ("attention residual", number))
        outputs(layer.mlp.gate_up_proj, "MLP in", number)
        outputs(layer.mlp.act_fn, "activation", number)
        outputs(layer.mlp, "MLP", number)
    norm(model.model.norm, "final norm", 0, ("MLP residual", len(model.model.layers) - 1))
    outputs(model.logits_processor, "head")


def of_trainer(model: Any, recorder: Recorder, head: int) -> None:
    """On Megatron's model, for one sequence at a time. Norms inside Transformer Engine's linear layers are left out.

    Args:
        head: size of an attention head.
    """

    def outputs(module: Any, name: str, layer: int = 0, order: Order | None = None, back: Order | None = None) -> None:
        if type(module).__name__ != "IdentityOp":
            module.register_forward_hook(lambda _, __, out: recorder.add(name, layer, _first(out), order, back))

    def inputs(module: Any, see: Callable[[tuple[Any, ...]], None]) -> None:
        module.register_forward_pre_hook(lambda _, given: see(given))

    def residual(norm: Any, name: str, layer: int) -> None:
        inputs(norm, functools.partial(_input, recorder, name, layer))

    outputs(model.embedding, "embedding")
    for number, layer in enumerate(model.decoder.layers):
        attention = layer.self_attention
        orders = [functools.partial(order, groups=attention.num_query_groups_per_partition, head=head) for order in (_by_kind, _by_group)]
        if number:
            residual(layer.input_layernorm, "MLP residual", number - 1)
        outputs(layer.input_layernorm, "norm", number)
        outputs(attention.linear_qkv, "qkv", number, *orders)
        inputs(attention.core_attention, functools.partial(_rope, recorder, number))
        outputs(attention.core_attention, "attention", number)
        outputs(attention.linear_proj, "attention projection", number)
        residual(layer.pre_mlp_layernorm, "attention residual", number)
        outputs(layer.pre_mlp_layernorm, "MLP norm", number)
        outputs(layer.mlp.linear_fc1, "MLP in", number)
        inputs(layer.mlp.linear_fc2, functools.partial(_input, recorder, "activation", number))
        outputs(layer.mlp, "MLP", number)
    residual(model.decoder.final_layernorm, "MLP residual", len(model.decoder.layers) - 1)
    outputs(model.decoder.final_layernorm, "final norm")
    outputs(model.output_layer, "head")


def _input(recorder: Recorder, name: str, layer: int, given: tuple[Any, ...]) -> None:
    recorder.add(name, layer, given[0])


def _rope(recorder: Recorder, layer: int, given: tuple[Any, ...]) -> None:
    query, key = given[:2]
    recorder.add("rope, queries", layer, query)
    recorder.add("rope, keys", layer, key)


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _tokens(values: torch.Tensor) -> torch.Tensor:
    """[tokens, width], from Megatron's [tokens, 1, ...]; packed rows have no 1 in attention."""
    return (values[:, 0] if values.dim() > 2 and values.shape[1] == 1 else values).flatten(1)


def _by_kind(rows: torch.Tensor, groups: int, head: int) -> torch.Tensor:
    """Megatron keeps each group's queries, key and value together; vLLM all queries, then all keys, then all values."""
    fused = rows.view(len(rows), groups, -1, head)
    query, key, value = fused.split([fused.shape[2] - 2, 1, 1], dim=2)
    return torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)


def _by_group(rows: torch.Tensor, groups: int, head: int) -> torch.Tensor:
    """The inverse of `_by_kind`."""
    kinds = rows.split([rows.shape[1] - 2 * groups * head, groups * head, groups * head], dim=1)
    return torch.cat([kind.view(len(rows), groups, -1, head) for kind in kinds], dim=2).flatten(1)
