"""The router, by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.routing import NoEngineError, Router

COSTS = st.lists(st.integers(1, 4096), max_size=60)
COUNT = st.integers(1, 6)


def _names(count: int) -> list[str]:
    return [f"engine-{i}" for i in range(count)]


@given(COUNT, COSTS)
def test_loads_differ_by_at_most_one_request(count: int, costs: list[int]) -> None:
    router = Router(_names(count))
    router.assign(costs)
    loads = [router.outstanding(name) for name in _names(count)]
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(COUNT, COSTS, COSTS)
def test_the_same_history_gives_the_same_assignment(count: int, first: list[int], second: list[int]) -> None:
    one, two = Router(_names(count)), Router(_names(count))
    assert [one.assign(first), one.assign(second)] == [two.assign(first), two.assign(second)]


@given(COUNT, COSTS)
def test_release_undoes_assign(count: int, costs: list[int]) -> None:
    router = Router(_names(count))
    for name, cost in zip(router.assign(costs), costs, strict=True):
        router.release(name, cost)
    assert {router.outstanding(name) for name in _names(count)} == {0}


@given(st.integers(2, 6), COSTS, COSTS, st.data())
def test_a_dead_engine_is_never_assigned_and_holds_nothing(count: int, before: list[int], after: list[int], data: st.DataObject) -> None:
    router = Router(_names(count))
    chosen = router.assign(before)
    dead = data.draw(st.sampled_from(_names(count)))
    router.mark_dead(dead, "first reason")
    router.mark_dead(dead, "second reason")
    assert dead not in router.assign(after)
    for name, cost in zip(chosen, before, strict=True):
        router.release(name, cost)
    assert router.outstanding(dead) == 0
    assert all(router.outstanding(name) >= 0 for name in router.alive)
    assert router.dead == {dead: "first reason"}


def test_a_tie_goes_to_the_first_name() -> None:
    router = Router(["b", "a", "c"])
    assert router.assign([5, 5, 5, 1]) == ["b", "a", "c", "b"]


def test_no_engine_left_says_why() -> None:
    router = Router(["engine-0"])
    router.mark_dead("engine-0", "killed by signal 9")
    with pytest.raises(NoEngineError, match="engine-0: killed by signal 9"):
        router.assign([1])


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_names_are_unique(names: list[str]) -> None:
    with pytest.raises(ValueError, match="unique"):
        Router(names)
