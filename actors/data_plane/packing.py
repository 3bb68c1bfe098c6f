"""Bin packing and number partitioning on plain integers: who shares a micro-batch, and which rank gets it.

sizes ──► first_fit_decreasing   few bins, each filled to the brim      ┐
      ──► balanced               a given number of bins, equally full   ├──► split_to ──► deal(loads, ranks) ──► bins of each rank
lengths ─► even_runs             runs of similar lengths                ┘    exactly so      equal in number,
                                                                             many bins       about equal in load

A bin is a list of item numbers. Every function breaks ties by item number, so equal input gives equal output.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence

import numpy as np

Bins = list[list[int]]


def first_fit_decreasing(sizes: Sequence[int], capacity: int, most: int) -> Bins:
    """Largest item first, each into the first bin that has room.

    Args:
        sizes: positive, each at most `capacity`.
        most: most items in a bin.

    Source: Johnson, "Near-optimal bin packing algorithms", MIT, 1973.
    """
    bins: Bins = [[] for _ in sizes]
    room = np.full(len(sizes), capacity)
    for item in _decreasing(sizes):
        number = int(np.argmax(room >= sizes[item]))  # the first
        bins[number].append(item)
        room[number] = room[number] - sizes[item] if len(bins[number]) < most else 0
    return [members for members in bins if members]


def best_fit_decreasing(sizes: Sequence[int], capacity: int, most: int, count: int) -> Bins | None:
    """Largest item first, each into the fullest bin that has room. None if `count` bins do not hold all; O(n log n) comparisons."""
    bins: Bins = [[] for _ in range(count)]
    free = [capacity * count + number for number in range(count)]  # (room, bin) as one integer, rising
    for item in _decreasing(sizes):
        place = bisect_left(free, sizes[item] * count)
        if place == len(free):
            return None
        entry = free.pop(place)
        members = bins[entry % count]
        members.append(item)
        if len(members) < most:
            insort(free, entry - sizes[item] * count)
    return bins


def balanced(sizes: Sequence[int], count: int, *, low: int, high: int, most: int) -> Bins | None:
    """`count` bins whose fullest is as little filled as can be found: balanced multiway number partitioning.

    Largest-first onto the emptiest bin (LPT) leaves the fullest some 1 % above the mean at eight items per bin. MULTIFIT, the
    smallest capacity with which best-fit-decreasing needs no more than `count` bins, searched to 0.2 %, closes most of that gap.

    Args:
        low: a fullest bin below this is no gain, and none is below the mean or the largest item.
        high: most that a bin may hold.
        most: most items in a bin.

    Returns:
        None if neither way keeps the bins within `high`. Bins may be empty.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969 (LPT); Coffman, Garey and Johnson, "An application of
    bin-packing to multiprocessor scheduling", 1978 (MULTIFIT).
    """
    best = _largest_first(sizes, count, most)
    if best is None:
        return None
    fullest = max(sum(sizes[item] for item in members) for members in best)
    if fullest > high:
        best, fullest = best_fit_decreasing(sizes, high, most, count), high
    tolerance = low // 500
    probe = min(low + tolerance, fullest)  # often reached at once
    while best is not None and fullest - low > tolerance:
        found = best_fit_decreasing(sizes, probe, most, count)
        if found is None:
            low = probe + 1
        else:
            best, fullest = found, probe
        probe = (low + fullest) // 2
    return best


def runs_within(lengths: Sequence[int], limit: int, buckets: Sequence[int]) -> Bins:
    """Falling lengths cut into the fewest runs that cost at most `limit`; a run costs rows x its longest length.

    Args:
        lengths: tokens of each padded row, falling.
        limit: one row of any length must fit.
        buckets: numbers of rows that a run may count as, rising; empty: any.
    """
    # Greedy from the longest is optimal: a run stays within the limit when it loses rows or takes shorter ones instead.
    runs: Bins = []
    start = 0
    while start < len(lengths):
        rows = limit // lengths[start]
        if buckets:
            rows = buckets[bisect_right(buckets, rows) - 1]
        stop = min(start + rows, len(lengths))
        runs.append(list(range(start, stop)))
        start = stop
    return runs


def even_runs(lengths: Sequence[int], count: int, budget: int, buckets: Sequence[int]) -> Bins:
    """At most `count` runs (see runs_within) whose costliest is as cheap as possible. `count` runs must do within `budget`."""
    limits = range(lengths[0] * (buckets[0] if buckets else 1), budget + 1)
    found = bisect_left(limits, True, key=lambda limit: len(runs_within(lengths, limit, buckets)) <= count)
    return runs_within(lengths, limits[found], buckets)


def split_to(bins: Bins, count: int, cost: Callable[[list[int]], int], halve: Callable[[list[int]], tuple[list[int], list[int]]]) -> Bins:
    """Exactly `count` bins: empty ones go, then the costliest with two items or more is halved, again and again.

    Only when there are fewer items than that are some bins empty.
    """
    out = [members for members in bins if members]
    heap = [(-cost(members), number) for number, members in enumerate(out) if len(members) > 1]
    heapq.heapify(heap)
    while len(out) < count and heap:
        _, number = heapq.heappop(heap)
        out[number], other = halve(out[number])
        out.append(other)
        for changed in (number, len(out) - 1):
            if len(out[changed]) > 1:
                heapq.heappush(heap, (-cost(out[changed]), changed))
    return out + [[] for _ in range(count - len(out))]


def deal(loads: Sequence[int], ranks: int) -> Bins:
    """Bin numbers of each rank: equally many, and sums of loads that are about equal.

    Heaviest first, in rounds of one bin per rank; within a round the heaviest bin goes to the rank that carries least.
    """
    order = _decreasing(loads)
    carried = [0] * ranks
    dealt: Bins = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        lightest = sorted(range(ranks), key=carried.__getitem__)
        for rank, number in zip(lightest, order[start : start + ranks], strict=True):
            dealt[rank].append(number)
            carried[rank] += loads[number]
    return dealt


def _decreasing(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # stable: ties stay in the order of their numbers


def _largest_first(sizes: Sequence[int], count: int, most: int) -> Bins | None:
    if len(sizes) > count * most:
        return None
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for item in _decreasing(sizes):
        load, number = heap[0]
        bins[number].append(item)
        if len(bins[number]) < most:
            heapq.heapreplace(heap, (load + sizes[item], number))
        else:
            heapq.heappop(heap)
    return bins
