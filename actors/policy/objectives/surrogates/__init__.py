"""Surrogates: what is maximised per token, of the policy's log-probabilities and the advantages. A file for each.

A surrogate is called as `function(logprobs, old, advantages, mask, loss)`, all [B, T] float32 (rows are responses), and returns

    the value per token, which carries the gradient; where the mask is 0 it is not read, and must be finite
    1 where a bound took the gradient away, or a part of it, else 0: `clip_fraction`

`logprobs` are the policy's, `old` those of the policy before the step's first update, `loss` is `policy.loss`. Without host reads: a CUDA
graph replays it. The loss is a sum over tokens, so what is of a whole response stands at each of its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from actors.policy.objectives.surrogates.cispo import cispo
from actors.policy.objectives.surrogates.clip import clip
from actors.policy.objectives.surrogates.gspo import gspo
from actors.policy.objectives.surrogates.sapo import sapo
from configs.import_path import imported_function

SurrogateFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_BUILT_IN: dict[str, SurrogateFunction] = {"clip": clip, "gspo": gspo, "cispo": cispo, "sapo": sapo}


@functools.cache
def find(name: str) -> SurrogateFunction:
    """The function that `policy.loss.surrogate` names.

    Raises:
        ConfigError: it cannot be imported, or does not take these arguments.
    """
    call = "function(logprobs, old, advantages, mask, loss)"
    return _BUILT_IN.get(name) or imported_function(name, "policy.loss.surrogate", call, None, None, None, None, None)
