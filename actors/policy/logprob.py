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

from actors.models.memory_parts import CUDA_KEPT_ELEMENTS, CUDA_SLICE_ELEMENTS

Projection = Callable[[torch.Tensor], torch.Tensor]  # [t, B, H] -> logits [t, B, width]

# Logits of one slice on one rank, on a CPU: 128 MiB in float32.
SLICE_ELEMENTS = 2**25


@dataclass(frozen=True)
class Top:
    """The so many (`count`) most probable of the vocabulary's first `among` tokens."""

    count: int
    among: int


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
    project: Projection,
    labels: torch.Tensor,
    temperature: torch.Tensor,
    shard: VocabShard,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(labels[:, t] | tokens up to position t) under softmax(logits / temperature), computed in float32.

    Args:
        hidden: [T, B, H], the last layer's output.
        project: [t, B, H] -> logits [t, B, shard.width], any float dtype.
        labels: [B, T] int64, the token that follows each position; or [B, T, n], that token and others, which differ from each other.
        temperature: [1] float32, on the logits' device; that of sampling gives the distribution that was sampled from.
        entropy_gradient: whether a loss reads the entropies; without it they carry no gradient.

    Returns:
        Log-probabilities, in the shape of `labels`, and entropies (nats) of the distribution each label came from, [B, T]: float32.
    """

    def one_slice(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _logprobs(project(part), wanted, temperature, shard, entropy_gradient=entropy_gradient)

    logprobs, entropies = _by_slices(one_slice, hidden, labels, shard)
    return logprobs, entropies


def top_logprobs(
    hidden: torch.Tensor,
    project: Projection,
    labels: torch.Tensor,
    temperature: torch.Tensor,
    shard: VocabShard,
    top: Top,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each label and of the most probable tokens in its place. Arguments as of `token_logprobs`; labels: [B, T].

    Returns:
        Log-probabilities of the label and of those tokens, [B, T, 1 + k] float32, the most probable first; entropies [B, T]; the tokens'
        vocabulary numbers, [B, T, k] int64.
    """

    def one_slice(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = project(part)
        ids = _most_probable(logits, shard, top)
        return *_logprobs(logits, torch.cat((wanted.unsqueeze(-1), ids), dim=-1), temperature, shard), ids

    logprobs, entropies, ids = _by_slices(one_slice, hidden, labels, shard)
    return logprobs, entropies, ids


def _by_slices(
    one_slice: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
) -> list[torch.Tensor]:
    """What it gives of each slice, [t, B, ...], together: [B, T, ...]."""
    targets = labels.transpose(0, 1)
    step = max(1, _slice_elements(hidden) // (labels.shape[0] * shard.width))
    recompute = torch.is_grad_enabled() and step < len(hidden)
    results = []
    for part, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        if recompute:
            results.append(checkpoint(one_slice, part, wanted, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(one_slice(part, wanted))
    return [torch.cat(parts).transpose(0, 1) for parts in zip(*results, strict=True)]


def _logprobs(
    logits: torch.Tensor, wanted: torch.Tensor, temperature: torch.Tensor, shard: VocabShard, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.is_cuda:
        return fused_vocab_logprobs(logits, wanted, temperature, shard, entropy_gradient=entropy_gradient)
    return vocab_logprobs(logits.float() / temperature, wanted, shard, entropy_gradient=entropy_gradient)


def _most_probable(logits: torch.Tensor, shard: VocabShard, top: Top) -> torch.Tensor:
    """Vocabulary numbers of the tokens with the largest logits, the largest first: [..., top.count] int64."""
    mine = min(max(min(top.among, shard.total) - shard.start, 0), shard.width)
    own = min(top.count, mine)
    values, ids = logits[..., :mine].topk(own)
    if shard.group is None:
        return ids
    missing = (0, top.count - own)  # other ranks have more
    values, ids = torch.nn.functional.pad(values, missing, value=-torch.inf), torch.nn.functional.pad(ids + shard.start, missing)
    both = torch.stack((values.double(), ids.double()))  # one message
    everyone = [torch.empty_like(both) for _ in range(torch.distributed.get_world_size(shard.group))]
    torch.distributed.all_gather(everyone, both, group=shard.group)
    values, numbers = torch.cat(everyone, dim=-1)
    best: torch.Tensor = numbers.gather(-1, values.topk(top.count).indices).long()
    return best


def _slice_elements(hidden: torch.Tensor) -> int:
    if not hidden.is_cuda:
        return SLICE_ELEMENTS
    return CUDA_KEPT_ELEMENTS if torch.is_grad_enabled() else CUDA_SLICE_ELEMENTS


def vocab_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the distribution's entropy.

    Args:
        logits: [..., shard.width] float32. targets: [...] or [..., n] int64, vocabulary numbers. entropy_gradient: as of `token_logprobs`.
    """
    padding = max(shard.start + shard.width - shard.total, 0)
    if padding:
        real = torch.arange(shard.width, device=logits.device) < shard.width - padding
        logits = torch.where(real, logits, torch.finfo(logits.dtype).min)
    wanted = targets.reshape(*logits.shape[:-1], -1)
    logprobs, entropies = _VocabParallelLogProb.apply(logits, wanted, shard, entropy_gradient)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape), entropies


class _VocabParallelLogProb(torch.autograd.Function):
    """log_softmax(logits)[targets], n of them, with the last dimension split over ranks, and the entropy H of p = softmax(logits).

    d log p(target) / d logits = onehot(target) - p      d H / d logits = -p (log p + H)      each rank its own columns: both need p and H
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        peak = logits.amax(dim=-1)
        if shard.group is not None:
            torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=shard.group)
        shifted = logits - peak.unsqueeze(-1)
        exponentials = shifted.exp()
        local = targets - shard.start
        mine = (local >= 0) & (local < shard.width)
        index = local.clamp(0, shard.width - 1)
        picked = torch.where(mine, shifted.gather(-1, index), 0.0)
        both = torch.stack((exponentials.sum(dim=-1), (exponentials * shifted).sum(dim=-1)))
        sums = torch.cat((both, picked.movedim(-1, 0)))
        if shard.group is not None:
            torch.distributed.all_reduce(sums, group=shard.group)
        total, weighted, picked = sums[0], sums[1], sums[2:].movedim(0, -1)
        entropy = total.log() - weighted / total  # -sum p log p, with log p = shifted - log(total)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, mine, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return picked - total.log().unsqueeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, index, mine, entropy = ctx.saved_tensors
        gradient = gradients[0]
        out = probabilities * -gradient.sum(dim=-1, keepdim=True)
        out.scatter_add_(-1, index, torch.where(mine, gradient, 0.0))
        if ctx.entropy_gradient:
            plogp = torch.special.xlogy(probabilities, probabilities)
            out -= gradients[1].unsqueeze(-1) * plogp.addcmul_(probabilities, entropy.unsqueeze(-1))
        return out, None, None, None


def fused_vocab_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, shard: VocabShard, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `vocab_logprobs(logits / temperature, ...)` gives, by Triton. The backward pass writes the gradient over the logits.

    Args:
        logits: [..., shard.width], any float dtype; nothing else may read them afterwards. temperature: [1] float32.
        targets: [...] int64; or [..., n], whose n - 1 last ones differ from each other.

    Raises:
        RuntimeError: in a second backward pass: the logits are gone.
    """
    arguments = logits.contiguous(), targets.reshape(*logits.shape[:-1], -1), temperature, shard, entropy_gradient
    logprobs, entropies = _FusedVocabParallelLogProb.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs.view(targets.shape), entropies


class _FusedVocabParallelLogProb(torch.autograd.Function):
    """As _VocabParallelLogProb, over logits that are not yet divided by the temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, shard: VocabShard, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from actors.policy import vocab_kernels

        flat, real = targets.flatten(0, -2), min(max(shard.total - shard.start, 0), shard.width)
        first, rows = flat[:, 0].contiguous(), logits.view(-1, shard.width)
        peak, total, weighted, picked = vocab_kernels.statistics(rows, first, shard.start, real, temperature)
        local = flat - shard.start
        mine = (local >= 0) & (local < real)
        highest = peak
        if shard.group is not None:
            highest = peak.clone()
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=shard.group)
        drop = peak - highest  # each rank's sums are relative to its own peak: move them to the common one
        found = torch.cat((picked.unsqueeze(-1), _at(rows, local[:, 1:], temperature)), dim=-1)
        found = torch.where(mine, found - highest.unsqueeze(-1), 0.0)
        moved = torch.stack((total, weighted + total * drop)) * drop.exp()
        sums = torch.cat((moved, found.t()))
        if shard.group is not None:
            torch.distributed.all_reduce(sums, group=shard.group)
        total, weighted = sums[:2]
        log_total = total.log()
        entropy = (log_total - weighted / total).view(targets.shape[:-1])
        ctx.save_for_backward(logits, flat, highest + log_total, entropy, temperature)
        ctx.columns, ctx.spent, ctx.entropy_gradient = (shard.start, real), False, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return (sums[2:] - log_total).t().reshape(targets.shape), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        from actors.policy import vocab_kernels

        if ctx.spent:
            raise RuntimeError("a second backward pass through fused log-probabilities: the first one wrote over the logits")
        ctx.spent = True
        logits, targets, log_total, entropy, temperature = ctx.saved_tensors
        # Of one position flatten() gives views whose rows lie apart: the kernels read rows one after the other.
        upstream = gradients[0].float().flatten(0, -2)
        of_entropy = (entropy.flatten().contiguous(), gradients[1].float().flatten().contiguous()) if ctx.entropy_gradient else None
        rows, several = logits.view(-1, logits.shape[-1]), targets.shape[-1] > 1
        if several:
            start, real = ctx.columns
            exact = _gradient_at(rows, targets, targets - start, log_total, upstream, temperature, of_entropy)
        first = torch.full_like(log_total, -1, dtype=torch.int64) if several else targets.flatten().contiguous()
        summed = upstream.sum(dim=-1).contiguous()
        vocab_kernels.gradient_(rows, first, log_total, summed, *ctx.columns, temperature, of_entropy)  # type: ignore[call-arg]
        if several:
            vocab_kernels.put_(rows, targets - start, exact, real)
        return logits, None, None, None, None


def _at(rows: torch.Tensor, columns: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits / temperature at these columns of each row, of any where a column is not this rank's: [N, n] float32."""
    return rows.gather(-1, columns.clamp(0, rows.shape[-1] - 1)).float() * (1.0 / temperature)


def _gradient_at(
    rows: torch.Tensor,
    targets: torch.Tensor,
    columns: torch.Tensor,
    log_total: torch.Tensor,
    upstream: torch.Tensor,
    temperature: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """What `vocab_kernels.gradient_` writes, at the targets themselves: [N, n] float32.

    There large terms nearly cancel (upstream_i against p_i times the sum of all upstream), so they are added before they are rounded.
    The first target may be one of the others: both get the sum.
    """
    again = targets[:, 1:] == targets[:, :1]
    first, others = upstream[:, :1], upstream[:, 1:]
    pull = torch.cat((first + (again * others).sum(dim=-1, keepdim=True), others + again * first), dim=-1)
    log_p = _at(rows, columns, temperature) - log_total.unsqueeze(-1)
    value = pull - log_p.exp() * upstream.sum(dim=-1, keepdim=True)
    if of_entropy is not None:
        entropy, its_pull = (one.unsqueeze(-1) for one in of_entropy)
        value = value - its_pull * log_p.exp() * (log_p + entropy)
    return value / temperature
