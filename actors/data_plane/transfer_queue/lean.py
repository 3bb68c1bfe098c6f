"""Imports TransferQueue without torch's compiler, which nobody here uses on a TensorDict: half of the CPU time of starting each process.

    transfer_queue ──► tensordict ──► @torch.compiler.allow_in_graph ──► torch._dynamo, sympy ...

The two decorators only mark functions for the compiler. OmegaConf, whose parser is slow to import, is for `transfer_queue.init`, which
nobody here calls. Import this before anything of transfer_queue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

import torch

from actors.unused import without


def _unmarked[F: Callable[..., object]](function: F) -> F:
    return function


with without("omegaconf"):
    if "torch._dynamo" in sys.modules:
        import transfer_queue
    else:
        with patch.multiple(torch.compiler, allow_in_graph=_unmarked, assume_constant_result=_unmarked):
            import transfer_queue  # noqa: F401
