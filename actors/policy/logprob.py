"""Log-probabilities of given tokens from hidden states, one slice of the sequence at a time.

    hidden [T, B, H] ── slice ──► logits [t, B, V/TP] ──► log p(token), entropy      (one slice's logits alive at a time)
                                     └── recomputed in the backward pass when there is more than one slice

Pure torch: the vocabulary may be split over a process group, as Megatron's output layer splits it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

SLICE_ELEMENTS = 2**25  # logits of one slice on one rank: 128 MiB in float32


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
    tokens: torch.Tensor,
    temperature: float,
    shard: VocabShard,
    slice_elements: int = SLICE_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(tokens[:, t] | tokens[:, :t]) under softmax(logits / temperature), computed in float32.

    Args:
        hidden: [T, B, H], the last layer's output.
        project: [t, B, H] -> logits [t, B, shard.width], any float dtype.
        tokens: [B, T] int64.
        temperature: of sampling, so that these are the log-probabilities of the distribution that was sampled from.

    Returns:
        Log-probabilities and entropies (nats; no gradient) of the distribution each token came from: [B, T] float32, 0 at t = 0.
    """
    targets = tokens[:, 1:].t()  # [T - 1, B]; position t predicts token t + 1
    inputs = hidden[:-1]
    step = max(1, slice_elements // (tokens.shape[0] * shard.width))

    def one_slice(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_logprobs(project(part).float() / temperature, wanted, shard)

    recompute = torch.is_grad_enabled() and step < len(inputs)
    results = []
    for part, wanted in zip(inputs.split(step), targets.split(step), strict=True):
        if recompute:
            results.append(checkpoint(one_slice, part, wanted, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(one_slice(part, wanted))
    logprobs, entropies = (torch.cat(parts).t() for parts in zip(*results, strict=True))
    return torch.nn.functional.pad(logprobs, (1, 0)), torch.nn.functional.pad(entropies, (1, 0))


def vocab_logprobs(logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the distribution's entropy (no gradient).

    Args:
        logits: [..., shard.width] float32. targets: [...] int64, vocabulary numbers.
    """
    padding = max(shard.start + shard.width - shard.total, 0)
    if padding:
        real = torch.arange(shard.width, device=logits.device) < shard.width - padding
        logits = torch.where(real, logits, torch.finfo(logits.dtype).min)
    logprobs, entropies = _VocabParallelLogProb.apply(logits, targets, shard)
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
