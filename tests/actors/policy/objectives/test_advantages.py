"""Advantage functions against their papers' formulas."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policy.objectives.advantages import AdvantageFunction
from actors.policy.objectives.advantages.group_relative import group_relative, over_the_batch
from actors.policy.objectives.advantages.max_likelihood import max_likelihood
from actors.policy.objectives.advantages.rloo import rloo

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


@given(REWARDS)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [[*rewards[:row], *rewards[row + 1 :]] for row in range(len(rewards))]
    expected = [reward - statistics.fmean(rest) for reward, rest in zip(rewards, others, strict=True)]
    assert rloo(rewards, normalize=False) == pytest.approx(expected, abs=1e-9)
    if deviation := statistics.pstdev(rewards):
        assert rloo(rewards, normalize=True) == pytest.approx([value / deviation for value in expected], abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=16), st.booleans())
def test_max_likelihood_divides_by_the_mean(rewards: list[float], normalize: bool) -> None:
    mean = statistics.fmean(rewards)
    expected = [reward / mean - 1 for reward in rewards] if mean else [0.0] * len(rewards)
    assert max_likelihood(rewards, normalize=normalize) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 7), st.integers(1, 7))
def test_max_likelihood_has_the_gradient_of_the_log_of_the_chance(right: int, wrong: int) -> None:
    """Of K right responses among G, each counts 1 / K - 1 / G in the mean: the sum over right ones of their gradients, over K."""
    group = right + wrong
    advantages = max_likelihood([1.0] * right + [0.0] * wrong, normalize=True)
    assert [value / group for value in advantages] == pytest.approx([1 / right - 1 / group] * right + [-1 / group] * wrong)


def test_max_likelihood_wants_rewards_that_are_chances() -> None:
    with pytest.raises(ValueError, match="wants rewards of 0 and above, and one is -1"):
        max_likelihood([1.0, -1.0], normalize=True)


@pytest.mark.parametrize("function", [rloo, max_likelihood])
@pytest.mark.parametrize("rewards", [[0.0] * 4, [0.3] * 4, [0.1 + 0.2, 0.3], [1.0]])
def test_equal_rewards_give_exact_zeros_everywhere(function: AdvantageFunction, rewards: list[float]) -> None:
    assert function(rewards, normalize=False) == function(rewards, normalize=True) == [0.0] * len(rewards)


@given(st.lists(REWARDS, min_size=1, max_size=5))
def test_over_the_batch(groups: list[list[float]]) -> None:
    centred = [value for rewards in groups for value in group_relative(rewards, normalize=False)]
    scaled = over_the_batch(centred)
    if deviation := statistics.pstdev(centred):
        assert scaled == pytest.approx([value / deviation for value in centred])
    else:
        assert scaled == centred
    assert [value == 0 for value in scaled] == [value == 0 for value in centred]  # a group without a gradient stays one
    assert over_the_batch([]) == []
