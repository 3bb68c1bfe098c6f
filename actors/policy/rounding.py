"""Stochastic rounding of the bfloat16 working copy from the float32 masters: an experiment (policy.rounding).

    master ── + a random part of one step of the grid ──► cut to bfloat16 ──► working copy: passes, log-probabilities, refits

Rounded to nearest, a weight stays where it is until its master has moved by half a step of the grid. Rounded by chance it is the master in
expectation, so a batch of weights follows its masters from the first step on (Gupta et al. 2015, arXiv 1502.02551). Trainer and engines
read the same copy.

The chance follows from the seed, the number of the rounding, and the place of the weight in the model: ranks that hold the same weight
round it alike, and a policy that was saved is rounded again to the same bits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from actors.policy.state import Part, parts

_DROPPED = 16  # bits of float32 that bfloat16 has not
_CHUNK = 2**22  # weights whose chances are drawn at once: 16 MiB


def stochastic(values: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """One of the two bfloat16 neighbours of each value, the nearer one more often; a bfloat16 number is itself.

    Args:
        values: float32. chances: int32 of the same shape, uniform in [0, 2**16).

    Returns:
        bfloat16; expected over the chances it is `values`.
    """
    bits = values.view(torch.int32)
    cut = (bits + chances) & -(1 << _DROPPED)  # sign and magnitude: what is added leads away from 0
    return torch.where(values.isfinite(), cut, bits).view(torch.float32).to(torch.bfloat16)


class Rounding:
    """Makes the working copy in place of Megatron's optimizer.

    Attributes:
        count: updates so far; to be raised before each. At 0 the copy is rounded to nearest.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.count = 0

    def attach(self, model: Any, optimizer: Any) -> None:
        """From now on each step of the optimizer rounds by chance. (Its gather of the working copy over data-parallel ranks follows.)"""
        present = parts(model, optimizer)
        for one in optimizer.chained_optimizers:
            held = [(part, _place(part)) for part in present if part.master is not None and part.optimizer is one.optimizer]
            one._copy_main_params_to_model_params = functools.partial(self._copy, held)

    def again(self, wrapped: Any, optimizer: Any) -> None:
        """The working copy from masters that were loaded. A collective.

        Args:
            wrapped: the model in Megatron's DistributedDataParallel.
        """
        with torch.no_grad():
            for one in optimizer.chained_optimizers:
                one._copy_main_params_to_model_params()
        if wrapped.ddp_config.use_distributed_optimizer:
            wrapped.start_param_sync()

    def _copy(self, held: list[tuple[Part, str]]) -> None:
        for part, place in held:
            assert part.master is not None
            target = part.parameter.detach().view(-1)[part.begin : part.end]
            values = part.master.detach().view(-1)
            if not self.count:
                target.copy_(values)
                continue
            for first, chances in self._chances(part, place):
                target[first : first + len(chances)] = stochastic(values[first : first + len(chances)], chances)

    def _chances(self, part: Part, place: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Of this rank's weights of the parameter: (the first of them, int32 chances)."""
        device, whole = part.parameter.device, part.parameter.numel()
        generator = torch.Generator(device)
        for start in range(part.begin // _CHUNK * _CHUNK, part.end, _CHUNK):
            drawn = f"{self._seed} {self.count} {place} {start}".encode()
            generator.manual_seed(int.from_bytes(hashlib.blake2b(drawn, digest_size=7).digest()))
            chunk = torch.randint(0, 1 << _DROPPED, (min(_CHUNK, whole - start),), generator=generator, device=device, dtype=torch.int32)
            first, last = max(part.begin, start), min(part.end, start + len(chunk))
            yield first - part.begin, chunk[first - start : last - start]


def _place(part: Part) -> str:
    """Where the parameter is in the whole model: the same on all ranks that hold it, tied copies of another stage included."""
    found = part.sharded
    while not isinstance(found, ShardedTensor):
        if isinstance(found, ShardedTensorFactory):
            found = found.build()
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return f"{found.key} {tuple(found.global_offset)}"
