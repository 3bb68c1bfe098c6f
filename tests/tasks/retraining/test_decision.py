"""Promote or keep, against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.retrain import PromotionConfig
from tasks.retraining.decision import Scores, decide


def verdict(old: float, new: float, margin: float = 0.01, metric: str = "accuracy") -> tuple[bool, str]:
    config = PromotionConfig.model_validate({"metric": metric, "margin": margin})
    if metric == "accuracy":
        found = decide(Scores(accuracy=old, reward=0.5), Scores(accuracy=new, reward=0.5), config)
    else:
        found = decide(Scores(accuracy=0.5, reward=old), Scores(accuracy=0.5, reward=new), config)
    return found.promote, found.reason


@pytest.mark.parametrize(
    ("old", "new", "margin", "promote", "words"),
    [
        (0.5, 0.6, 0.01, True, "accuracy 0.5000 -> 0.6000: better by 0.1000, the margin is 0.01"),
        (0.6, 0.5, 0.01, False, "worse by 0.1000"),
        (0.5, 0.5, 0.01, False, "no better"),
        (0.5, 0.5, 0.0, False, "no better"),
        (0.5, 0.505, 0.01, False, "better by 0.0050, less than the margin of 0.01"),
        (0.5, 0.505, 0.0, True, "better by 0.0050"),
        (0.29, 0.3, 0.01, True, "better by 0.0100"),
        (math.nan, 0.9, 0.01, False, "not a number"),
        (0.5, math.nan, 0.01, False, "not a number"),
        (0.5, math.inf, 0.01, False, "not a number"),
    ],
)
def test_the_verdict_and_why(old: float, new: float, margin: float, promote: bool, words: str) -> None:
    found, reason = verdict(old, new, margin)
    assert found == promote
    assert words in reason


def test_only_the_chosen_metric_counts() -> None:
    old, new = Scores(accuracy=0.5, reward=0.1), Scores(accuracy=0.4, reward=0.9)
    assert decide(old, new, PromotionConfig(metric="reward")).promote
    assert not decide(old, new, PromotionConfig(metric="accuracy")).promote


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))), st.integers(0, 100))
def test_it_is_exact_for_counts(counts: tuple[int, int, int], percent: int) -> None:
    """Accuracies are counts over the set's size: rounding must not turn a gain of exactly the margin into less."""
    size, old, new = counts
    gain = Fraction(new - old, size)
    assert verdict(old / size, new / size, percent / 100)[0] == (gain > 0 and gain >= Fraction(percent, 100))
