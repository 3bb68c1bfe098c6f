"""Advantages: how much better each response is than its group, from the rewards of one prompt's responses.

An advantage function is called as `function(rewards, normalize=policy.loss.normalize_advantages)` and returns a number per reward, in
their order. A response with 0 has no gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

from configs.base import ConfigError
from configs.import_path import imported

AdvantageFunction = Callable[..., Sequence[float]]


def group_relative(rewards: Sequence[float], *, normalize: bool) -> list[float]:
    """A_i = (r_i - mean(r)) / std(r) (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    std is the population's (divide by G): the group is all there is, not a sample of a larger one. Equal rewards give zeros.

    Args:
        normalize: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    if deviation <= 1e-8 * max(1.0, *map(abs, rewards)):  # equal but for rounding
        return [0.0] * len(rewards)
    return [value / deviation for value in centred] if normalize else centred


def find(name: str) -> AdvantageFunction:
    """The function that `policy.loss.advantages` names.

    Raises:
        ConfigError: it cannot be imported, or does not take these arguments.
    """
    field = "policy.loss.advantages"
    found: AdvantageFunction = group_relative if name == "group_relative" else imported(name, field)
    try:
        inspect.signature(found).bind([0.0], normalize=True)
    except TypeError as error:
        raise ConfigError(f"{field}: {name!r} cannot be called as function(rewards, normalize=...): {error}") from None
    return found
