"""An experiment on a CPU: Megatron's model with the engine's arithmetic, each operation with a backward pass. Of `precision --exact`.

    norm         of the float32 sum of residual and update, as vLLM's       torch's own backward pass
    rope         in float32, cut to bfloat16 where vLLM's kernel cuts       torch's, through the cut as if it were none
    attention    vLLM's kernel, over all tokens of the sequence at once     the gradient of the formula, recomputed
    log-softmax  torch's, as vLLM's sampler                                 torch's

Products are Megatron's own. Nothing else in this project runs with it: it is here to see whether these four are all that stands between
the bits of engine and trainer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_BLOCK_SIZE = 128  # of vLLM's KV cache on a CPU


def cut(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values in another dtype; bfloat16 towards zero, as vLLM's vector types for CPUs without AVX512-BF16 (`cpu_types_x86.hpp`)."""
    if dtype != torch.bfloat16 or values.is_cuda or torch.cpu._is_avx512_bf16_supported():
        return values.to(dtype)
    return (values.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).to(dtype)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cut(values, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].float(), None


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention in float32.

    Args:
        query: [tokens, heads, size]. key, value: [tokens, groups, size].

    Returns:
        [tokens, heads, size].
    """
    q, k, v = (one.float().transpose(0, 1) for one in (query, key, value))
    k, v = (one.repeat_interleave(len(q) // len(k), dim=0) for one in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)


class EngineAttention(torch.autograd.Function):
    """vLLM's kernel for CPUs over one sequence from its first token on; the gradient is that of `formula`."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As `formula`, in the dtype of the arguments."""
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        ctx.save_for_backward(query, key, value)
        tokens, heads, size = query.shape
        groups, dtype = key.shape[1], query.dtype
        blocks, isa = -(-tokens // _BLOCK_SIZE), _get_attn_isa(dtype, _BLOCK_SIZE, size)
        cache = torch.zeros(blocks, groups, 2 * _BLOCK_SIZE, size, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), keys, values, torch.arange(tokens), isa)
        begins, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(1, heads, groups, size, lengths, dtype, begins, True, -1, isa, True)
        output, table = torch.empty_like(query.contiguous()), torch.arange(blocks, dtype=torch.int32)[None]
        ops.cpu_attention_with_kv_cache(
            query.contiguous(), keys, values, output, begins, lengths, size**-0.5, True, None, -1, table, 0.0, plan, None
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            given = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            return torch.autograd.grad(formula(*given), given, gradients[0].float())


def swap(model: Any) -> None:
    """Put the engine's arithmetic into Megatron's model, and into this process: for one sequence at a time, on one CPU worker."""
    from megatron.core.models.common.embeddings import rope_utils

    from actors.policy import logprob

    rope_utils._apply_rotary_pos_emb_bshd = _rope
    logprob.vocab_logprobs = _vocab_logprobs
    for layer in model.decoder.layers:
        layer.self_attn_bda = layer.mlp_bda = lambda training, fused: _add
        layer.self_attention.core_attention.forward = _attention
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            _swap_norm(norm)
    _swap_norm(model.decoder.final_layernorm)


def _add(update: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
    """Residual and update, as stored; the norm that follows reads the sum in float32."""
    exact = update[0].float() + residual.float()
    stored: Any = exact.to(residual.dtype)
    stored.exact = exact
    return stored  # type: ignore[no-any-return]


def _swap_norm(norm: Any) -> None:
    def forward(values: torch.Tensor) -> torch.Tensor:
        exact = getattr(values, "exact", values.float())
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.eps)
        normed: torch.Tensor = scaled.to(norm.weight.dtype) * norm.weight
        return normed

    norm.forward = forward


def _rope(values: torch.Tensor, freqs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """[tokens, 1, heads, size], with angles [tokens, 1, 1, size]."""
    cos, sin = (one.to(values.dtype).float() for one in (freqs.cos(), freqs.sin()))
    a, b = values.float().chunk(2, dim=-1)
    turned: torch.Tensor = _Cut.apply(values.float() * cos + torch.cat([-b, a], dim=-1) * sin, values.dtype)  # type: ignore[no-untyped-call]
    return turned


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Megatron's [tokens, 1, heads, size] to [tokens, 1, heads x size]."""
    found: torch.Tensor = EngineAttention.apply(query[:, 0], key[:, 0], value[:, 0])  # type: ignore[no-untyped-call]
    return found.flatten(1)[:, None]


def _vocab_logprobs(logits: torch.Tensor, targets: torch.Tensor, shard: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `logprob.vocab_logprobs`, without padding and parallelism; entropies have no gradient."""
    assert shard.group is None
    logprobs = logits[..., : shard.total].log_softmax(-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[..., None])[..., 0], entropies
