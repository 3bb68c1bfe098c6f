"""Advantages: how much better each response is than its group, from the rewards of one prompt's responses. A file for each function.

An advantage function is called as `function(rewards, normalize=...)` and returns a number per reward, in their order. A response with 0 has
no gradient. `normalize` is whether policy.loss.normalize_advantages is `group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.policy.objectives.advantages.group_relative import group_relative
from actors.policy.objectives.advantages.max_likelihood import max_likelihood
from actors.policy.objectives.advantages.reinforce import reinforce
from actors.policy.objectives.advantages.rloo import rloo
from configs.import_path import imported_function

AdvantageFunction = Callable[..., Sequence[float]]
_BUILT_IN: dict[str, AdvantageFunction] = {
    "group_relative": group_relative,
    "rloo": rloo,
    "max_likelihood": max_likelihood,
    "reinforce": reinforce,
}


def find(name: str) -> AdvantageFunction:
    """The function that `policy.loss.advantages` names.

    Raises:
        ConfigError: it cannot be imported, or does not take these arguments.
    """
    call = "function(rewards, normalize=...)"
    return _BUILT_IN.get(name) or imported_function(name, "policy.loss.advantages", call, [0.0], normalize=True)
