"""Bins, runs and deals: against naive references, brute force, and the bounds of the papers."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.packing import (
    Bins,
    balanced,
    best_fit_decreasing,
    deal,
    even_runs,
    first_fit_decreasing,
    runs_within,
    split_to,
)

MANY = 10**6


def naive(sizes: list[int], capacity: int, most: int, *, best: bool) -> Bins:
    """First-fit (or best-fit) decreasing as the textbook has it: look at every open bin."""
    bins: Bins = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rooms = [(capacity - sum(sizes[i] for i in members), n) for n, members in enumerate(bins) if len(members) < most]
        fitting = [(room, n) for room, n in rooms if room >= sizes[item]]
        if fitting:
            bins[(min(fitting) if best else fitting[0])[1]].append(item)
        else:
            bins.append([item])
    return bins


def fullest(bins: Bins, sizes: list[int]) -> int:
    return max(sum(sizes[i] for i in members) for members in bins)


def assert_all_once(bins: Bins, n: int) -> None:
    assert sorted(i for members in bins for i in members) == list(range(n))


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int, int]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=60))
    return sizes, draw(st.integers(max(sizes), 120)), draw(st.sampled_from([1, 2, 3, 7, MANY]))


@given(packings())
def test_fast_fits_equal_the_textbook(case: tuple[list[int], int, int]) -> None:
    sizes, capacity, most = case
    assert first_fit_decreasing(sizes, capacity, most) == naive(sizes, capacity, most, best=False)
    wanted = naive(sizes, capacity, most, best=True)
    opened = best_fit_decreasing(sizes, capacity, most, len(sizes))
    assert opened == wanted + [[]] * (len(sizes) - len(wanted))
    assert best_fit_decreasing(sizes, capacity, most, len(wanted)) == wanted
    assert best_fit_decreasing(sizes, capacity, most, len(wanted) - 1) is None


@given(packings(), st.integers(1, 20))
def test_balanced_bins_keep_the_limits(case: tuple[list[int], int, int], count: int) -> None:
    sizes, capacity, most = case
    low = max(-(-sum(sizes) // count), max(sizes))
    bins = balanced(sizes, count, low=low, high=capacity, most=most)
    if bins is None:
        assert len(naive(sizes, capacity, most, best=True)) > count
        return
    assert len(bins) == count
    assert_all_once(bins, len(sizes))
    assert low <= fullest(bins, sizes) <= capacity
    assert max(map(len, bins)) <= most


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balanced_bins_are_near_the_best_that_there_is(sizes: list[int], count: int) -> None:
    best = min(
        max(sum(s for s, b in zip(sizes, choice, strict=True) if b == n) for n in range(count))
        for choice in product(range(count), repeat=len(sizes))
    )
    low = max(-(-sum(sizes) // count), max(sizes))
    bins = balanced(sizes, count, low=low, high=sum(sizes), most=MANY)
    assert bins is not None
    # Graham's bound for LPT, and the result is never worse than LPT's.
    assert best <= fullest(bins, sizes) <= best * (4 * count - 1) / (3 * count)


def cost(lengths: list[int], run: list[int], buckets: list[int]) -> int:
    return lengths[run[0]] * min((b for b in buckets if b >= len(run)), default=len(run))


@st.composite
def falling(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    lengths = sorted(draw(st.lists(st.integers(1, 40), min_size=1, max_size=12)), reverse=True)
    buckets = sorted(draw(st.sets(st.integers(1, 6), max_size=3)))
    return lengths, buckets, draw(st.integers(lengths[0] * (buckets[0] if buckets else 1), 300))


@given(falling(), st.integers(1, 12))
def test_runs_are_as_few_and_as_even_as_can_be(case: tuple[list[int], list[int], int], count: int) -> None:
    lengths, buckets, budget = case
    n = len(lengths)
    most = buckets[-1] if buckets else n
    # table[k][i]: the cheapest costliest run when the first i rows are cut into k runs.
    table = [[0] + [MANY] * n]
    for _ in range(n):
        last = table[-1]
        table.append(
            [MANY]
            + [min(max(last[i], cost(lengths, list(range(i, j)), buckets)) for i in range(max(j - most, 0), j)) for j in range(1, n + 1)]
        )
    fewest = next(k for k in range(n + 1) if table[k][n] <= budget)
    runs = runs_within(lengths, budget, buckets)
    assert [i for run in runs for i in run] == list(range(n))
    assert max(cost(lengths, run, buckets) for run in runs) <= budget
    assert len(runs) == fewest

    if count >= fewest:
        even = even_runs(lengths, count, budget, buckets)
        assert [i for run in even for i in run] == list(range(n))
        assert len(even) <= count
        assert max(cost(lengths, run, buckets) for run in even) == min(table[k][n] for k in range(1, min(count, n) + 1))


@given(packings(), st.integers(0, 100))
def test_split_to_gives_exactly_so_many_bins(case: tuple[list[int], int, int], more: int) -> None:
    sizes, capacity, most = case
    packed = first_fit_decreasing(sizes, capacity, most)
    count = len(packed) + more
    bins = split_to([[], *packed], count, lambda members: sum(sizes[i] for i in members), lambda members: (members[::2], members[1::2]))
    assert len(bins) == count
    assert_all_once(bins, len(sizes))
    assert sum(not members for members in bins) == max(count - len(sizes), 0), "empty only without items to give"
    assert fullest(bins, sizes) <= capacity


def test_split_to_halves_the_costliest() -> None:
    halve = lambda members: (members[:1], members[1:])  # noqa: E731
    assert split_to([[0, 1], [2, 3, 4], []], 4, sum, halve) == [[0, 1], [2], [3], [4]]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ranks_are_dealt_equally_many_bins_and_about_equal_loads(ranks: int, each: int, data: st.DataObject) -> None:
    loads = data.draw(st.lists(st.integers(0, 100), min_size=ranks * each, max_size=ranks * each))
    dealt = deal(loads, ranks)
    assert [len(numbers) for numbers in dealt] == [each] * ranks
    assert_all_once(dealt, len(loads))
    sums = [sum(loads[n] for n in numbers) for numbers in dealt]
    # No round widens the gap beyond its own: the heaviest bin goes to the lightest rank.
    assert max(sums) - min(sums) <= max(loads) - min(loads)


def test_no_bins_hold_too_many_items() -> None:
    assert balanced([1, 1, 1], 1, low=3, high=9, most=2) is None
    assert balanced([5, 5, 5], 2, low=8, high=9, most=3) is None
    assert first_fit_decreasing([], 4, 1) == []
