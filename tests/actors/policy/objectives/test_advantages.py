"""Group-relative advantages against the paper's formula."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policy.objectives.advantages import group_relative

REWARDS = st.lists(st.integers(-8, 8).map(lambda quarters: quarters / 4), min_size=2, max_size=16)


@given(REWARDS)
def test_formula(rewards: list[float]) -> None:
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]
    assert group_relative(rewards, normalize=True) == pytest.approx(expected)
    assert group_relative(rewards, normalize=False) == pytest.approx([reward - mean for reward in rewards])


@given(REWARDS)
def test_centred(rewards: list[float]) -> None:
    assert sum(group_relative(rewards, normalize=True)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e9 + 0.1])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exact_zeros(reward: float, normalize: bool) -> None:
    assert group_relative([reward] * 7, normalize=normalize) == [0.0] * 7


def test_rewards_equal_but_for_rounding() -> None:
    assert group_relative([0.1 + 0.2, 0.3], normalize=True) == [0.0, 0.0]
