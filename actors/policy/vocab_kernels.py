"""Triton kernels over rows of logits, for CUDA: each reads the logits once, computes in float32, and writes no float32 copy of them.

    logits [N, V] ──► statistics ──► per row: peak, sum e, sum e·x, the target's x   (x = logit / temperature, e = exp(x - peak))
                  ──► gradient_  ──► in place: d / d logits of the target's log-probability, times the upstream gradient;
                                     of the entropy as well, where the loss reads it
                  ──► put_       ──► in place: given values at given columns

Transformer Engine 2.20's `parallel_cross_entropy` does the same for a plain cross entropy; it knows no temperature, no entropy,
and no padding of the vocabulary, which a policy's log-probabilities need. Imported where CUDA is used, since Triton needs it
(or TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8
_FEW = 128  # elements of a row at once, where only some are written


def statistics(logits: torch.Tensor, targets: torch.Tensor, first: int, real: int, temperature: torch.Tensor) -> torch.Tensor:
    """One pass over each row's first `real` columns, as an online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    Args:
        logits: [N, V] contiguous, any float dtype. targets: [N] int64, vocabulary numbers.
        first: vocabulary number of column 0. real: columns that are no padding.
        temperature: [1] float32. A tensor, so that a captured graph reads that of each batch.

    Returns:
        [4, N] float32, of x = logit / temperature: the largest, the sum of exp(x - largest), the sum of exp(x - largest) · (x - largest),
        and the target's x (0 where the target is not among the columns).
    """
    rows, width = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _statistics[(rows,)](logits, targets, out, rows, width, first, real, temperature, BLOCK=_BLOCK, num_warps=_WARPS)
    return out


def gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_total: torch.Tensor,
    upstream: torch.Tensor,
    first: int,
    real: int,
    temperature: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Overwrite the logits with (upstream · (onehot(target) - p) - pull · p · (log p + H)) / temperature, p = softmax; padding gets 0.

    Args:
        log_total: [N] float32, log of the sum of exp(x) over the whole vocabulary. upstream: [N] float32. The rest as of `statistics`.
        of_entropy: H and pull, the entropies and their upstream gradient, [N] float32 each; None: they have none.

    Returns:
        The logits.
    """
    rows, width = logits.shape
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        entropy, pull = of_entropy or (upstream, upstream)  # not read without it
        options = {"ENTROPY": of_entropy is not None, "BLOCK": _BLOCK, "num_warps": _WARPS}
        _gradient[grid](logits, targets, log_total, upstream, entropy, pull, width, first, real, temperature, **options)
    return logits


def put_(logits: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, real: int) -> None:
    """Overwrite some elements of each row.

    Args:
        logits: [N, V] contiguous. columns: [N, n] int64; those below 0 or from `real` on are left out. values: [N, n] float32.
    """
    rows, count = columns.shape
    if rows:
        _put[(rows,)](logits, columns.contiguous(), values.contiguous(), logits.shape[1], count, real, BLOCK=_FEW, num_warps=1)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(logits, targets, out, rows, width, first, real, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, scale = tl.program_id(0), 1.0 / tl.load(temperature)
    line = logits + row.to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    peak, total, weighted = -1e30, 0.0, 0.0  # finite: differences of peaks are numbers from the first block on
    for start in range(0, real, BLOCK):
        inside = start + columns < real
        x = tl.load(line + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        highest = tl.maximum(peak, tl.max(tl.where(inside, x, -1e30), axis=0))
        gap = tl.where(inside, x - highest, 0.0)
        exponential = tl.where(inside, tl.exp(gap), 0.0)
        drop = peak - highest
        kept = tl.exp(drop)
        weighted = kept * (weighted + total * drop) + tl.sum(exponential * gap, axis=0)
        total = kept * total + tl.sum(exponential, axis=0)
        peak = highest
    column = tl.load(targets + row) - first
    mine = (column >= 0) & (column < real)
    picked = tl.load(line + column, mask=mine, other=0.0).to(tl.float32) * scale
    tl.store(out + row, peak)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, picked)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits, targets, log_total, upstream, entropy, pull, width, first, real, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row, scale = tl.program_id(0), 1.0 / tl.load(temperature)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = logits + row.to(tl.int64) * width
    x = tl.load(line + columns, mask=columns < real, other=0.0).to(tl.float32) * scale
    log_probability = x - tl.load(log_total + row)
    probability = tl.exp(log_probability)
    hit = columns == tl.load(targets + row) - first
    value = tl.load(upstream + row) * scale * (tl.where(hit, 1.0, 0.0) - probability)
    if ENTROPY:
        value -= tl.load(pull + row) * scale * probability * (log_probability + tl.load(entropy + row))
    value = tl.where(columns < real, value, 0.0)
    tl.store(line + columns, value.to(logits.dtype.element_ty), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def _put(logits, columns, values, width, count, real, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        column = tl.load(columns + row * count + places, mask=places < count, other=-1)
        value = tl.load(values + row * count + places, mask=places < count, other=0.0)
        tl.store(logits + row * width + column, value.to(logits.dtype.element_ty), mask=(column >= 0) & (column < real))
