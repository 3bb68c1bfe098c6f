"""Against references that are slow and plain: subsets are enumerated, equations solved by bisection, sums written as double loops."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.statistics import Tally, accuracy, mean_pass_at_k, paired_difference, pass_at_k, wilson

Z95 = 1.959963984540054
TALLIES = st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=12)


def tallies(pairs: list[tuple[int, int]]) -> list[Tally]:
    return [Tally(judged, right) for judged, right in pairs]


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_part_of_all_subsets_that_holds_a_right_answer(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_where_binomials_do_not_fit_a_float() -> None:
    exact = 1 - math.comb(9_900, 5_000) / math.comb(10_000, 5_000)
    assert pass_at_k(10_000, 100, 5_000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_of_what_is_not_there(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(n, c, k)


@given(TALLIES)
def test_pass_at_k_grows_with_k_and_pass_at_1_is_the_accuracy(pairs: list[tuple[int, int]]) -> None:
    assert mean_pass_at_k(tallies(pairs), 1) == pytest.approx(accuracy(tallies(pairs), 0.95).value)
    for n, c in pairs:
        values = [pass_at_k(n, c, k) for k in range(1, n + 1)]
        assert values == sorted(values)
        assert values[-1] == float(c > 0)


def test_problems_with_too_few_judged_answers_are_left_out() -> None:
    assert mean_pass_at_k([Tally(4, 1), Tally(1, 1)], 2) == pytest.approx(0.5)
    assert mean_pass_at_k([Tally(1, 1)], 2) is None
    assert Tally.of([True, None, False, True]) == Tally(3, 2)


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3, to 4 digits.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(right: int, of: int, low: float, high: float) -> None:
    assert wilson(right / of, of, 0.95) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_are_the_roots_of_the_score_equation(case: tuple[int, int]) -> None:
    right, n = case
    rate = right / n

    def inside(p: float) -> bool:
        return abs(rate - p) <= Z95 * math.sqrt(p * (1 - p) / n) + 1e-15

    def root(inner: float, outer: float) -> float:
        for _ in range(100):
            middle = (inner + outer) / 2
            inner, outer = (middle, outer) if inside(middle) else (inner, middle)
        return inner

    low, high = wilson(rate, n, 0.95)
    assert low == pytest.approx(root(rate, 0.0), abs=1e-6)
    assert high == pytest.approx(root(rate, 1.0), abs=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_one_answer_to_each_problem_gives_wilsons_interval(right: list[bool], confidence: float) -> None:
    found = accuracy([Tally(1, int(one)) for one in right], confidence)
    low, high = wilson(sum(right) / len(right), len(right), confidence)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@given(TALLIES)
def test_accuracy_lies_in_its_interval_and_the_interval_in_0_to_1(pairs: list[tuple[int, int]]) -> None:
    found = accuracy(tallies(pairs), 0.95)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert found.high > found.low
    wider = accuracy(tallies(pairs), 0.99)
    assert wider.low <= found.low
    assert found.high <= wider.high
    assert accuracy(tallies(pairs[::-1]), 0.95).low == pytest.approx(found.low)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=10))
def test_the_effective_number_of_answers_is_that_of_the_clustered_error(rights: list[int]) -> None:
    m, problems = 4, len(rights)
    answers = [[True] * right + [False] * (m - right) for right in rights]
    n = m * problems
    mean = sum(map(sum, answers)) / n
    # Miller: the variance of independent answers, and the covariances within a problem.
    variance = sum((x - mean) ** 2 for group in answers for x in group) / n**2
    variance += sum((group[i] - mean) * (group[j] - mean) for group in answers for i in range(m) for j in range(m) if i != j) / n**2
    binomial = mean * (1 - mean)
    effective = problems if binomial == 0 else n if variance * n <= binomial else binomial / variance
    found = accuracy([Tally(m, right) for right in rights], 0.95)
    assert (found.low, found.high) == (pytest.approx(wilson(mean, effective, 0.95)[0]), pytest.approx(wilson(mean, effective, 0.95)[1]))
    assert problems - 1e-9 <= effective <= n


def test_answers_that_repeat_each_other_add_nothing() -> None:
    once, eight_times = accuracy([Tally(1, i % 2) for i in range(40)], 0.95), accuracy([Tally(8, 8 * (i % 2)) for i in range(40)], 0.95)
    assert (once.low, once.high) == (pytest.approx(eight_times.low), pytest.approx(eight_times.high))


def test_nothing_judged() -> None:
    found = accuracy([Tally(0, 0)], 0.95)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 1.0)
    assert accuracy([Tally(0, 0), Tally(2, 1)], 0.95) == accuracy([Tally(2, 1)], 0.95)


def test_the_interval_covers_what_it_says_where_answers_to_a_problem_are_alike() -> None:
    """Problems of very different difficulty: 4 answers to each of 60. The interval that takes answers for independent ones fails."""
    random = np.random.default_rng(19)
    covered, naive = [], []
    for _ in range(600):
        right = random.binomial(4, random.beta(0.3, 0.3, 60))  # of mean 0.5
        found = accuracy([Tally(4, int(one)) for one in right], 0.95)
        covered.append(found.low <= 0.5 <= found.high)
        low, high = wilson(float(right.sum()) / 240, 240, 0.95)
        naive.append(low <= 0.5 <= high)
    assert 0.93 <= np.mean(covered) <= 0.98
    assert np.mean(naive) < 0.85


def agresti_min(b: int, c: int, n: int) -> tuple[float, float]:
    """Wald+2 from the 2 x 2 table with 0.5 added to each cell: b only before, c only after, of n."""
    b2, c2, n2 = b + 0.5, c + 0.5, n + 2
    middle, error = (c2 - b2) / n2, math.sqrt((b2 + c2) / n2 - ((c2 - b2) / n2) ** 2) / math.sqrt(n2)
    return max(-1.0, middle - Z95 * error), min(1.0, middle + Z95 * error)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=50))
def test_paired_difference_of_single_answers(pairs: list[tuple[bool, bool]]) -> None:
    found = paired_difference([float(a) for a, _ in pairs], [float(b) for _, b in pairs], 0.95)
    worse, better = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    assert found.value == pytest.approx((better - worse) / len(pairs))
    low, high = agresti_min(worse, better, len(pairs))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_paired_difference_is_antisymmetric_and_within_its_interval(pairs: list[tuple[float, float]]) -> None:
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired_difference(before, after, 0.95), paired_difference(after, before, 0.95)
    assert there.value == pytest.approx(-back.value)
    assert there.low == pytest.approx(-back.high)
    assert -1 <= there.low <= there.value <= there.high <= 1


def test_pairing_is_what_makes_a_small_gain_sure() -> None:
    before = [float(i % 2) for i in range(200)]
    after = [1.0 if i < 16 else value for i, value in enumerate(before)]
    found = paired_difference(before, after, 0.95)
    assert (found.value, found.low > 0) == (8 / 200, True)
    unpaired = accuracy([Tally(1, int(x)) for x in before], 0.95), accuracy([Tally(1, int(x)) for x in after], 0.95)
    assert unpaired[1].low < unpaired[0].high


def test_problems_without_a_judged_answer_are_in_no_pair() -> None:
    assert paired_difference([None, 0.0, 1.0], [1.0, None, 1.0], 0.95) == paired_difference([1.0], [1.0], 0.95)
    assert paired_difference([None], [1.0], 0.95).low == -1.0
    with pytest.raises(ValueError, match=r"longer|shorter"):
        paired_difference([0.0], [0.0, 1.0], 0.95)
