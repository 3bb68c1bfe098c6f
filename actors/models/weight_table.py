"""Hugging Face weights into Megatron shards and back, from one table.

    HF file ──read one tensor──► shard for (tp, pp) ──► parameter and master        load
    parameter ──all-gather over TP──► broadcast over PP ──► HF tensor    export (a collective: every rank takes part)

A Megatron parameter holds one or more HF tensors: fused QKV keeps, per query group, its query heads, its key head and its
value head together; fused gate and up are stacked within each tensor-parallel shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from actors.models.hf import head_dim, open_weights


class Layout(Protocol):
    """How HF tensors lie in one Megatron parameter."""

    def shard(self, full: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """The parameter of tensor-parallel rank `rank` of `size`."""

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The HF tensors, from the parameters of all ranks in order."""


class Replicated:
    """Every rank holds the whole tensor."""

    def shard(self, full: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return full[0]

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """Each tensor cut evenly along `dim` (0 for a column-parallel layer, 1 for a row-parallel layer), its parts stacked along it."""

    dim: int
    tensors: int = 1

    def shard(self, full: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return torch.cat([tensor.chunk(size, dim=self.dim)[rank] for tensor in full], dim=self.dim)

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [shard.chunk(self.tensors, dim=self.dim) for shard in shards]
        return [torch.cat(tensor, dim=self.dim) for tensor in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Vocab:
    """Cut along dimension 0 after padding with zero rows to what divides; the padding does not come back."""

    tokens: int

    def shard(self, full: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return torch.nn.functional.pad(full[0], (0, 0, 0, -self.tokens % size)).chunk(size, dim=0)[rank]

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: self.tokens]]


@dataclass(frozen=True)
class Qkv:
    """Per query group: `queries` query heads, one key head, one value head, of `head_dim` rows each. Weights and biases alike."""

    groups: int
    queries: int
    head_dim: int

    def shard(self, full: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        rest = full[0].shape[1:]
        query, key, value = (tensor.view(self.groups, -1, self.head_dim, *rest) for tensor in full)
        fused = torch.cat([query, key, value], dim=1)
        return fused.chunk(size, dim=0)[rank].reshape(-1, *rest)

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rest = shards[0].shape[1:]
        fused = torch.cat(list(shards)).view(self.groups, self.queries + 2, self.head_dim, *rest)
        return [part.reshape(-1, *rest) for part in fused.split([self.queries, 1, 1], dim=1)]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter: its name on the stage that owns it, the HF tensors in it, and how they lie there."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    stage: int


def table(hf: Any, stages: int) -> list[Entry]:
    """Every parameter of the model in HF order. Layers are divided evenly over the pipeline's stages."""
    per_stage = hf.num_hidden_layers // stages
    entries = [Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab(hf.vocab_size), 0)]
    for layer in range(hf.num_hidden_layers):
        entries += _layer(hf, layer, layer % per_stage, layer // per_stage)
    entries.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated(), stages - 1))
    if not hf.tie_word_embeddings:
        entries.append(Entry("output_layer.weight", ("lm_head.weight",), Vocab(hf.vocab_size), stages - 1))
    return entries


def _layer(hf: Any, layer: int, local: int, stage: int) -> list[Entry]:
    groups = hf.num_key_value_heads
    qkv = Qkv(groups, hf.num_attention_heads // groups, head_dim(hf))
    source, target = f"model.layers.{layer}", f"decoder.layers.{local}"
    attention = [f"{source}.self_attn.{name}_proj" for name in "qkv"]
    rows: list[tuple[str, tuple[str, ...], Layout]] = [
        ("input_layernorm.weight", (f"{source}.input_layernorm.weight",), Replicated()),
        ("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in attention), qkv),
        ("self_attention.linear_proj.weight", (f"{source}.self_attn.o_proj.weight",), Split(1)),
        ("pre_mlp_layernorm.weight", (f"{source}.post_attention_layernorm.weight",), Replicated()),
        ("mlp.linear_fc1.weight", (f"{source}.mlp.gate_proj.weight", f"{source}.mlp.up_proj.weight"), Split(0, tensors=2)),
        ("mlp.linear_fc2.weight", (f"{source}.mlp.down_proj.weight",), Split(1)),
    ]
    if hf.model_type == "qwen2":
        rows.append(("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in attention), qkv))
    if hf.model_type == "qwen3":
        rows += [(f"self_attention.{name}_layernorm.weight", (f"{source}.self_attn.{name}_norm.weight",), Replicated()) for name in "qk"]
    return [Entry(f"{target}.{name}", names, layout, stage) for name, names, layout in rows]


def read_hf(model: GPTModel, path: str, hf: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of this rank, and what a Hugging Face directory has for it: in the file's own dtype, one tensor in memory at a time.

    Raises:
        ValueError: a tensor that the table wants is not in the files or has another shape, or a parameter that no entry fills.
    """
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    parameters = _parameters(model)
    unfilled = set(parameters)
    entries = table(hf, stages)
    if hf.tie_word_embeddings and stages > 1:  # the last stage holds a copy that Megatron keeps equal by summing gradients
        entries.append(Entry("output_layer.weight", ("model.embed_tokens.weight",), Vocab(hf.vocab_size), stages - 1))
    with open_weights(path) as files:
        for entry in entries:
            if entry.stage == stage:
                if missing := [name for name in entry.hf if name not in files]:
                    raise ValueError(f"the model's files have no tensor {missing[0]!r}")
                shard = entry.layout.shard([files[name].get_tensor(name) for name in entry.hf], rank, size)
                if shard.shape != parameters[entry.megatron].shape:
                    raise ValueError(
                        f"{', '.join(entry.hf)} in {path} give {entry.megatron} the shape {tuple(shard.shape)}; "
                        f"config.json says {tuple(parameters[entry.megatron].shape)}"
                    )
                yield parameters[entry.megatron], shard
                unfilled.discard(entry.megatron)
    if unfilled:
        raise ValueError(f"no Hugging Face tensor fills {', '.join(sorted(unfilled))}")


def load_hf(model: GPTModel, path: str, hf: Any) -> None:
    """Fill the parameters of a model that has no optimizer. Raises as `read_hf`."""
    with torch.no_grad():
        for parameter, full in read_hf(model, path, hf):
            parameter.copy_(full)


# Transformer Engine keeps these norms inside the linear layer that follows them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def _parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """By the table's names, whichever layer implementation the model has."""
    found = {}
    for name, parameter in model.named_parameters():
        for fused, plain in _FUSED_NORMS.items():
            name = name.replace(fused, plain)
        found[name] = parameter
    return found


def export_hf(model: GPTModel, hf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor) of every weight, in the table's order. A collective: all ranks iterate; all get every tensor."""
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    parameters = _parameters(model)
    for entry in table(hf, stages):
        tensors: list[torch.Tensor] = []
        if entry.stage == stage:
            tensors = entry.layout.merge(_gather_over_tp(parameters[entry.megatron].detach()))
        if stages > 1:
            tensors = _broadcast_over_pp(tensors, entry.stage, len(entry.hf), next(model.parameters()))
        yield from zip(entry.hf, tensors, strict=True)


def _gather_over_tp(tensor: torch.Tensor) -> list[torch.Tensor]:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(size)]
    torch.distributed.all_gather(shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards


def _broadcast_over_pp(tensors: list[torch.Tensor], stage: int, count: int, like: torch.Tensor) -> list[torch.Tensor]:
    group = parallel_state.get_pipeline_model_parallel_group()
    source = torch.distributed.get_process_group_ranks(group)[stage]
    shapes: list[Any] = [[tuple(tensor.shape) for tensor in tensors]]
    torch.distributed.broadcast_object_list(shapes, src=source, group=group)
    if not tensors:
        tensors = [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes[0]]
    tensors = [tensor.contiguous() for tensor in tensors]
    for tensor in tensors:
        torch.distributed.broadcast(tensor, src=source, group=group)
    return tensors
