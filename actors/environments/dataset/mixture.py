"""Several sources as one: training prompts in the proportions of their weights, validation prompts of each.

weights 3 : 1 ──► a a a b a a a b ...     every beginning of the order is within one prompt of the proportions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actors.environments.base import Environment, Problem, Split


class Mixture(Environment):
    """An epoch is as long as it takes to see every prompt of each source once or more often; the smaller sources begin again within it.

    Args:
        sources: environments by name, in the order of the recipe. weights: as many, positive.
    """

    def __init__(self, sources: Mapping[str, Environment], weights: Sequence[float]) -> None:
        self._sources = dict(sources)
        sizes = {name: source.size("train") for name, source in self._sources.items()}
        self._order = interleave(sizes, weights)
        self._validation = [(name, i) for name, source in self._sources.items() for i in range(source.size("validation"))]

    def size(self, split: Split) -> int:
        return len(self._order) if split == "train" else len(self._validation)

    def problem(self, split: Split, index: int) -> Problem:
        if not 0 <= index < self.size(split):
            raise IndexError(f"{split} problem {index} of {self.size(split)}")
        name, number = (self._order if split == "train" else self._validation)[index]
        found = self._sources[name].problem(split, number)
        uid = found.uid if found.uid.startswith(f"{name}:") else f"{name}:{found.uid}"
        return replace(found, source=name, uid=uid)

    def counts(self) -> dict[str, int]:
        """Rows of the sources that are not trained on; see `DatasetEnvironment.counts`."""
        total: dict[str, int] = {}
        for source in self._sources.values():
            for what, number in (source.counts() if hasattr(source, "counts") else {}).items():
                total[what] = total.get(what, 0) + number
        return total


def interleave(sizes: Mapping[str, int], weights: Sequence[float]) -> list[tuple[str, int]]:
    """(source, number in it) of one epoch: always the source that is furthest behind its part, the earlier one of equals.

    Each number of a source comes before any comes again. The order ends when every number of every source has come.
    """
    names, total = list(sizes), sum(weights)
    parts = [weight / total for weight in weights]
    length = max(round(-(-size // 1) / part) for size, part in zip(sizes.values(), parts, strict=True))
    drawn = [0] * len(names)
    order: list[tuple[str, int]] = []
    while len(order) < length or any(count < size for count, size in zip(drawn, sizes.values(), strict=True)):
        due = [(len(order) + 1) * part - count for part, count in zip(parts, drawn, strict=True)]
        chosen = due.index(max(due))
        order.append((names[chosen], drawn[chosen] % sizes[names[chosen]]))
        drawn[chosen] += 1
    return order
