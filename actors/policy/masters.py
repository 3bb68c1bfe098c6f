"""Where the float32 master weights begin: at the checkpoint's own numbers, or where the optimizer before had them.

    file, float32 ──► master ──round──► the working copy that passes, reference and engines read

Megatron's optimizer copies its masters from the working copy, which is rounded: a master that begins on the coarse grid must first move by
half a step of it before anything that it is read for changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from actors.policy.state import MASTER, parts


def fill(model: Any, optimizer: Any, weights: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Parameters and masters from full tensors in a precision of their own: [local shape], on the CPU.

    Args:
        model: Megatron's, not wrapped. optimizer: what `build_optimizer` made of it.
    """
    held = {id(part.parameter): part for part in parts(model, optimizer)}
    with torch.no_grad():
        for parameter, full in weights:
            held[id(parameter)].restore(MASTER, full)


def held(model: Any, optimizer: Any) -> list[torch.Tensor | None]:
    """This rank's masters, not copied, in the model's order; None where another rank has all of one."""
    return [part.master for part in parts(model, optimizer)]


def carry_over(model: Any, optimizer: Any, masters: list[torch.Tensor | None]) -> None:
    """Into a new optimizer over the same model, what `held` gave of the one before."""
    with torch.no_grad():
        for part, master in zip(parts(model, optimizer), masters, strict=True):
            if part.master is not None and master is not None:
                part.master.copy_(master)
