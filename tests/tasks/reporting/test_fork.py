"""The paired comparison of a fork: values against numpy, and what it shows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reporting.fork import Comparison, changed_settings, compare, markdown


def rows(values: list[float], first: int = 1, metric: str = "reward/mean") -> list[dict[str, Any]]:
    return [{"step": step, metric: value} for step, value in enumerate(values, first)]


def newey_west(differences: np.ndarray) -> float:
    """Standard error of the mean, written with matrices: w' C w."""
    count = len(differences)
    lags = min(math.floor(4 * (count / 100) ** (2 / 9)), count - 1)
    centred = differences - differences.mean()
    weights = np.clip(1 - np.abs(np.subtract.outer(np.arange(count), np.arange(count))) / (lags + 1), 0, None)
    return math.sqrt(max(centred @ weights @ centred, 0.0) / count / (count - 1))


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=2, max_size=60))
def test_mean_and_interval(pairs: list[tuple[float, float]]) -> None:
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    (change,) = compare(rows(before), rows(after), at=0)
    differences = np.subtract(after, before)
    assert change.steps == len(pairs)
    assert change.change == pytest.approx(differences.mean(), abs=1e-9)
    assert change.low is not None
    assert change.high is not None
    assert (change.high - change.low) / 2 == pytest.approx(1.959964 * newey_west(differences), abs=1e-6)


def test_only_common_steps_after_the_fork_count() -> None:
    parent, child = rows([0.0, 0.0, 0.5, 0.5]), rows([0.0, 0.0, 1.0, 1.0, 9.0])
    (change,) = compare(parent, child, at=2)
    assert (change.steps, change.parent, change.child, change.change) == (2, 0.5, 1.0, 0.5)


def test_one_step_has_no_interval_and_no_common_step_no_row() -> None:
    (change,) = compare(rows([1.0]), rows([2.0]), at=0)
    assert (change.low, change.high) == (None, None)
    assert compare(rows([1.0]), rows([2.0], metric="kl"), at=0) == ()
    assert compare(rows([1.0]), rows([2.0]), at=1) == ()


def test_the_page_names_what_differs() -> None:
    before, now = {"a": {"b": 1, "c": 2}, "resume": "auto"}, {"a": {"b": 3, "c": 2}, "resume": "fork:x"}
    changes = compare(rows([1.0, 2.0]), rows([2.0, 2.0]), at=0)
    page = markdown(Comparison(parent="run", at=5, changed=changed_settings(before, now), changes=changes))
    assert "# Fork of run after step 5" in page
    assert "* `a.b: 1 -> 3`" in page
    assert "| reward/mean | 2 | 1.500 | 2 | 0.5000 |" in page
