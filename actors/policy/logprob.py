"""Log-probabilities of given tokens from hidden states, one slice of the sequence at a time.

    hidden [T, B, H] ── slice ──► logits [t, B, V/TP] ──► log p(token), entropy      (one slice's logits alive at a time)
                                     └── recomputed in the backward pass when there is more than one slice

The vocabulary may be split over a process group, as by Megatron's output layer. On CUDA the logits keep their dtype, are read once
(vocab_kernels.py), and are overwritten by their own gradient; on a CPU all is plain torch in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from actors.models.memory_plan import CUDA_KEPT_ELEMENTS

# Logits of one slice on one rank.
SLICE_ELEMENTS = 2**25  # on a CPU: 128 MiB in float32
CUDA_SLICE_ELEMENTS = 2**28  # without a gradient: 512 MiB in bfloat16, and still a large matrix product


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits.

    Attributes:
        start: vocabulary number of the first column.
        width: columns on each rank.
        total: tokens in the vocabulary; columns beyond it are padding and have probability 0.
        group: the ranks that hold the vocabulary together; None: this one alone.
    """

    start: int
    width: int
    total: int
    group: torch.distributed.ProcessGroup | None = None


def token_logprobs(
    hidden: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    temperature: float,
    shard: VocabShard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(labels[:, t] | tokens up to position t) under softmax(logits / temperature), computed in float32.

    Args:
        hidden: [T, B, H], the last layer's output.
        project: [t, B, H] -> logits [t, B, shard.width], any float dtype.
        labels: [B, T] int64, the token that follows each position.
        temperature: of sampling, so that these are the log-probabilities of the distribution that was sampled from.

    Returns:
        Log-probabilities and entropies (nats; no gradient) of the distribution each label came from: [B, T] float32.
    """
    targets = labels.t()
    step = max(1, _slice_elements(hidden) // (labels.shape[0] * shard.width))

    def one_slice(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = project(part)
        if logits.is_cuda:
            return fused_vocab_logprobs(logits, wanted, temperature, shard)
        return vocab_logprobs(logits.float() / temperature, wanted, shard)

    recompute = torch.is_grad_enabled() and step < len(hidden)
    results = []
    for part, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        if recompute:
            results.append(checkpoint(one_slice, part, wanted, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(one_slice(part, wanted))
    logprobs, entropies = (torch.cat(parts).t() for parts in zip(*results, strict=True))
    return logprobs, entropies


def _slice_elements(hidden: torch.Tensor) -> int:
    if not hidden.is_cuda:
        return SLICE_ELEMENTS
    return CUDA_KEPT_ELEMENTS if torch.is_grad_enabled() else CUDA_SLICE_ELEMENTS


def vocab_logprobs(logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the distribution's entropy (no gradient).

    Args:
        logits: [..., shard.width] float32. targets: [...] int64, vocabulary numbers.
    """
    padding = max(shard.start + shard.width - shard.total, 0)
    if padding:
        real = torch.arange(shard.width, device=logits.device) < shard.width - padding
        logits = torch.where(real, logits, torch.finfo(logits.dtype).min)
    logprobs, entropies = _VocabParallelLogProb.apply(logits, targets, shard)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _VocabParallelLogProb(torch.autograd.Function):
    """log_softmax(logits)[target] with the last dimension split over ranks; d/dlogits = onehot(target) - softmax."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
        peak = logits.amax(dim=-1)
        if shard.group is not None:
            torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=shard.group)
        shifted = logits - peak.unsqueeze(-1)
        exponentials = shifted.exp()
        local = targets - shard.start
        mine = (local >= 0) & (local < shard.width)
        index = local.clamp(0, shard.width - 1).unsqueeze(-1)
        picked = torch.where(mine, shifted.gather(-1, index).squeeze(-1), 0.0)
        sums = torch.stack((exponentials.sum(dim=-1), (exponentials * shifted).sum(dim=-1), picked))
        if shard.group is not None:
            torch.distributed.all_reduce(sums, group=shard.group)
        total, weighted, picked = sums
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, mine)
        entropy = total.log() - weighted / total  # -sum p log p, with log p = shifted - log(total)
        ctx.mark_non_differentiable(entropy)
        return picked - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, index, mine = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        out = probabilities * -gradient
        out.scatter_add_(-1, index, torch.where(mine.unsqueeze(-1), gradient, 0.0))
        return out, None, None


def fused_vocab_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `vocab_logprobs(logits / temperature, ...)` gives, by Triton. The backward pass writes the gradient over the logits.

    Args:
        logits: [..., shard.width], any float dtype; nothing else may read them afterwards. targets: [...] int64.

    Raises:
        RuntimeError: in a second backward pass: the logits are gone.
    """
    logprobs, entropies = _FusedVocabParallelLogProb.apply(logits.contiguous(), targets, 1.0 / temperature, shard)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _FusedVocabParallelLogProb(torch.autograd.Function):
    """As _VocabParallelLogProb, over logits that are not yet divided by the temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: float, shard: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from actors.policy import vocab_kernels

        flat = targets.flatten().contiguous()  # of one position, flatten() is a view whose rows lie apart
        real = min(max(shard.total - shard.start, 0), shard.width)
        peak, total, weighted, picked = vocab_kernels.statistics(logits.view(-1, shard.width), flat, shard.start, real, scale)
        mine = (flat >= shard.start) & (flat < shard.start + real)
        highest = peak
        if shard.group is not None:
            highest = peak.clone()
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=shard.group)
        drop = peak - highest  # each rank's sums are relative to its own peak: move them to the common one
        sums = torch.stack((total, weighted + total * drop, torch.zeros_like(total))) * drop.exp()
        sums[2] = torch.where(mine, picked - highest, 0.0)
        if shard.group is not None:
            torch.distributed.all_reduce(sums, group=shard.group)
        total, weighted, picked = sums
        log_total = total.log()
        entropy = (log_total - weighted / total).view(targets.shape)
        ctx.save_for_backward(logits, flat, highest + log_total)
        ctx.columns, ctx.scale, ctx.spent = (shard.start, real), scale, False
        ctx.mark_non_differentiable(entropy)
        return (picked - log_total).view(targets.shape), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        from actors.policy import vocab_kernels

        if ctx.spent:
            raise RuntimeError("a second backward pass through fused log-probabilities: the first one wrote over the logits")
        ctx.spent = True
        logits, targets, log_total = ctx.saved_tensors
        upstream = gradients[0].float().flatten().contiguous()  # of one position, see above
        rows = logits.view(-1, logits.shape[-1])
        gradient = vocab_kernels.gradient_(rows, targets, log_total, upstream, *ctx.columns, ctx.scale)  # type: ignore[call-arg]
        return gradient.view(logits.shape), None, None, None
