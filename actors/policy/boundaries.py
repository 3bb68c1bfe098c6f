"""Keeps the sequences of a packed row apart inside the model: a mask for Megatron's own attention, THD for Transformer Engine.

boundaries 0 3 5 5 (T = 5)     mask   a . . . .        THD   cu_seqlens 0 3 5 5
                                      a a . . .
                                      a a a . .
                                      . . . b .
                                      . . . b b
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from actors.policy.batch import CANDIDATES, MicroBatch

# Transformer Engine's attention gets dense rows of whole tiles only: in a replayed backward pass over other rows cuDNN's kernel reads
# past its tensors (NaN gradients, illegal memory accesses on H200, torch 2.11; TE refuses them for cuDNN <= 9.15, TE pull 2344).
DENSE_MULTIPLE = 128


def packed_inputs(boundaries: torch.Tensor | None, length: int, longest: int, *, thd: bool, split: bool = False) -> dict[str, Any]:
    """The arguments of GPTModel's forward that say which tokens see each other. Shapes depend on S, T and L alone.

    Rotary positions restart at each sequence with THD. With the mask they continue through the row, since Megatron's local rotary
    embedding takes no position ids; the scores are the same, as they depend on differences of positions (RoPE, arXiv 2104.09864, eq. 16).

    Args:
        boundaries: `MicroBatch.boundaries`; None: the rows are padded, and causal attention needs no more.
        length: T, tokens of the row. longest: L, most tokens of a slot. thd: whether the attention is Transformer Engine's.
        split: over context-parallel ranks. Boundaries, T and L stay those of the whole row.

    Returns:
        attention_mask ([1, 1, T, T] bool, True hides the key; or None) and packed_seq_params (or None).
    """
    if boundaries is None:
        return {"attention_mask": None, "packed_seq_params": None}
    if thd:
        from megatron.core.packed_seq_params import PackedSeqParams

        # Slots with their padding stand for sequences: causality hides the padding, and every output is defined. L as the bound: CUDA
        # graphs want one per shape, and the kernels' work and buffers grow with slots x bound.
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        if split:  # Transformer Engine asks for them then
            params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = boundaries
            params.pad_between_seqs = False  # else it would compare the two on the host
        return {"attention_mask": None, "packed_seq_params": params}
    return {"attention_mask": block_diagonal_mask(boundaries, length), "packed_seq_params": None}


def rows_as_slots(b: MicroBatch, chunks: int = 1) -> MicroBatch:
    """Padded rows [B, T] as the slots of one packed row [1, B * T]; rows that are packed, or of whole tiles (DENSE_MULTIPLE), as they are.

    Args:
        chunks: into which context parallelism cuts a row; each must be of whole tiles.
    """
    size, length = b.input_ids.shape
    if b.boundaries is not None or length % (DENSE_MULTIPLE * chunks) == 0:
        return b
    device = b.input_ids.device
    places = torch.arange(size * length, device=device).view(size, length)
    candidates = {name: found.flatten(0, 1)[None] for name in CANDIDATES if (found := getattr(b, name)) is not None}
    return dataclasses.replace(
        b,
        input_ids=b.input_ids.reshape(1, -1),
        position_ids=b.position_ids.reshape(1, -1),
        boundaries=torch.arange(0, size * length + 1, length, dtype=torch.int32, device=device),
        index=torch.nn.functional.pad(places[:, 1:], (1, 0)),
        **candidates,
    )


def block_diagonal_mask(boundaries: torch.Tensor, length: int) -> torch.Tensor:
    """[1, 1, T, T] bool, True where query t may not see key s: s is later, or in another slot."""
    slot = torch.bucketize(torch.arange(length, device=boundaries.device), boundaries[1:], right=True)
    return ~(slot[:, None] == slot).tril()[None, None]
