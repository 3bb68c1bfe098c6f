"""Several sources as one: training prompts in the proportions of their weights, validation prompts of each.

weights 3 : 1 ──► a a b a a a b a ...     every beginning of the order is within one prompt of the proportions
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from actors.environments.base import Environment, Problem, Split
from actors.environments.dataset.environment import DatasetEnvironment
from actors.environments.dataset.problems import prompt_digest
from configs.base import ConfigError

_LONGEST = 20_000_000  # prompts of an epoch; making its order takes about 1 s for a million
_HOPS = 100
_ROUNDING = 1e-9


class Mixture(Environment):
    """An epoch is as long as it takes to see every prompt of each source once or more often; the smaller sources begin again within it.

    What one source holds out is trained on in none. A prompt that several data sets have is trained on in the first.

    Args:
        sources: environments by name, in the order of the recipe. weights: as many, positive.

    Raises:
        ConfigError: a source of which nothing is left to train on, or weights that make an epoch too long.
    """

    def __init__(self, sources: Mapping[str, Environment], weights: Sequence[float]) -> None:
        self._sources = dict(sources)
        self._validation = [(name, i) for name, source in self._sources.items() for i in range(source.size("validation"))]
        self._held_out = {prompt_digest(self._sources[name].problem("validation", i)) for name, i in self._validation}
        seen: set[bytes] = set()
        for source in self._sources.values():
            if isinstance(source, DatasetEnvironment):
                source.leave_out(self._held_out, seen)
                seen.update(source.train_digests)
        self._order = interleave({name: source.size("train") for name, source in self._sources.items()}, weights)

    def size(self, split: Split) -> int:
        return len(self._order) if split == "train" else len(self._validation)

    def problem(self, split: Split, index: int) -> Problem:
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} problem {index} of {self.size(split)}")
        if split == "train":
            place, number = self._order[index].tolist()
            name = list(self._sources)[place]
            found = self._train_problem(name, number)
        else:
            name, number = self._validation[index]
            found = self._sources[name].problem(split, number)
        return replace(found, source=name, uid=f"{name}:{found.uid}")

    def _train_problem(self, name: str, number: int) -> Problem:
        source = self._sources[name]
        # Generated problems are not known before they are made: instead of one that another source holds out comes the next.
        for hop in range(_HOPS):
            found = source.problem("train", (number + hop) % source.size("train"))
            if prompt_digest(found) not in self._held_out:
                return found
        raise ConfigError(
            f"environment.sources.{name}: {_HOPS} problems in a row are held out by the sources: lower their validation_size, "
            "or widen task_options"
        )


def interleave(sizes: Mapping[str, int], weights: Sequence[float]) -> np.ndarray:
    """The sources in the proportions of their weights, until every number of each has come.

    Returns int32 [positions, 2]: which source, and the number in it; each number of a source comes before any comes again.

    After n positions a source of part p has come n * p times, give or take 1 - 1 / (2k - 2) for k sources; no rule does better for all
    weights (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). Of the sources that are due comes the one with
    the earliest deadline, the earlier in the recipe of equals.

    Raises:
        ConfigError: that takes more than 20 million positions.
    """
    total = sum(weights)
    parts = [weight / total for weight in weights]
    lengths = {name: size / part for (name, size), part in zip(sizes.items(), parts, strict=True)}
    longest = max(lengths, key=lengths.__getitem__)
    if lengths[longest] > _LONGEST:
        raise ConfigError(
            f"environment.sources.{longest}: with its weight an epoch would have {lengths[longest]:,.0f} prompts, at most {_LONGEST:,} are "
            "possible: raise the weight, or leave out a part of the source"
        )
    slack = 1 / (2 * len(parts) - 2) if len(parts) > 1 else 0.0
    drawn, missing = [0] * len(parts), len(parts)
    needed = list(sizes.values())
    order, position = array("i"), 0
    while missing:
        position += 1
        due = [i for i, part in enumerate(parts) if part * position - drawn[i] >= slack - _ROUNDING]
        best = min(due, key=lambda i: (drawn[i] + 1 - slack) / parts[i])
        order.extend((best, drawn[best] % needed[best]))
        drawn[best] += 1
        missing -= drawn[best] == needed[best]
    return np.asarray(order).reshape(-1, 2)
