"""Imports TransferQueue without torch's compiler, which nobody here uses on a TensorDict: half of the CPU time of starting each process.

    transfer_queue ──► tensordict ──► @torch.compiler.allow_in_graph ──► torch._dynamo, sympy ...

The two decorators only mark functions for the compiler. Import this before anything of transfer_queue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

import torch


def _unmarked[F: Callable[..., object]](function: F) -> F:
    return function


if "torch._dynamo" in sys.modules:
    import transfer_queue
else:
    with patch.multiple(torch.compiler, allow_in_graph=_unmarked, assume_constant_result=_unmarked):
        import transfer_queue  # noqa: F401
