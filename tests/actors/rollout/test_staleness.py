"""Each sampler's row of the table, on hand-made states; the sampler that a configuration names; its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.rollout.staleness import Admission, BufferState, Group, InOrder, ReadyFirst, Refusal, WeightFifo, Windowed, build
from configs.base import ConfigError
from configs.staleness import SAMPLERS, AsyncConfig


def group(uid: str, state: Any, start: int, target: int | None = None, committed: int | None = None, claimed: int | None = None) -> Group:
    return Group(uid, (f"{uid}/0",), state, start, target, 0.0, commit_number=committed, claimed_version=claimed)


def state(version: int, *groups: Group, trained: int = 0) -> BufferState:
    return BufferState(version, {group.uid: group for group in groups}, trained)


MIXED = state(
    5,
    group("a", "committed", 3, committed=4),
    group("b", "committed", 5, committed=0),
    group("c", "in_flight", 4),
    group("d", "committed", 4, committed=3),
    group("e", "committed", 4, committed=1),
    group("f", "claimed", 3, committed=2, claimed=5),
    group("g", "cancelled", 2),
)


@pytest.mark.parametrize(
    ("sampler", "order"),
    [(Windowed, "aedb"), (ReadyFirst, "beda"), (WeightFifo, "aed")],
)
def test_order_of_service(sampler: Any, order: str) -> None:
    rule = sampler(max_age=2, groups_per_step=4)
    for count in range(1, 7):
        assert [group.uid for group in rule.select(MIXED, count)] == list(order[:count])


def test_weight_fifo_waits_for_older_weights_only() -> None:
    rule = WeightFifo(max_age=2, groups_per_step=2)
    stored = [group("a", "committed", 4, committed=0), group("b", "committed", 5, committed=1)]
    for flying, found in ((3, ""), (4, "a"), (5, "ab")):
        assert [g.uid for g in rule.select(state(5, *stored, group("c", "in_flight", flying)), 2)] == list(found)
        assert [g.uid for g in rule.select(state(5, *stored, group("c", "cancelled", flying)), 2)] == ["a", "b"]


@pytest.mark.parametrize(("sampler", "late"), [(Windowed, {"a": "too_old"}), (WeightFifo, {"a": "too_old"}), (ReadyFirst, {})])
def test_eviction_by_age(sampler: Any, late: dict[str, str]) -> None:
    assert sampler(max_age=1, groups_per_step=4).evict(MIXED) == late
    assert sampler(max_age=2, groups_per_step=4).evict(MIXED) == {}


def test_a_group_in_flight_is_evicted_too() -> None:
    assert Windowed(max_age=0, groups_per_step=1).evict(MIXED) == dict.fromkeys("acde", "too_old")


@pytest.mark.parametrize("sampler", [ReadyFirst, WeightFifo])
def test_gated_admission_counts_what_is_ahead(sampler: Any) -> None:
    # a, b, c, d, e, f are ahead of version 5 (f taken for it), g is not.
    assert sampler(max_age=1, groups_per_step=4).admit(MIXED) == Admission()
    assert sampler(max_age=2, groups_per_step=2).admit(MIXED) == Refusal("6 groups ahead of version 5, at most 2 x (2 + 1)")
    taken_before = state(5, *(replace(g, claimed_version=4) if g.uid == "f" else g for g in MIXED.groups.values()))
    assert sampler(max_age=2, groups_per_step=2).admit(taken_before) == Admission()
    assert isinstance(sampler(max_age=2, groups_per_step=2).admit(replace(taken_before, trained=1)), Refusal)


def test_in_order_stamps_the_first_step_that_lacks_a_group() -> None:
    rule = InOrder(max_age=1, groups_per_step=2)
    held = [group("a", "claimed", 3, 3, claimed=3), group("b", "committed", 3, 3, 0), group("c", "in_flight", 3, 4)]
    assert rule.admit(state(3)) == Admission(3)
    assert rule.admit(state(3, *held)) == Admission(4)
    assert rule.admit(state(3, *held[:1], held[2])) == Admission(3)  # b was dropped: its step comes first
    assert rule.admit(state(3, *held[1:])) == Admission(3)
    assert rule.admit(state(3, *held[1:], trained=1)) == Admission(4)
    assert rule.admit(state(3, *held, group("d", "cancelled", 3, 4))) == Admission(4)
    assert rule.admit(state(3, *held, group("d", "in_flight", 3, 4))) == Refusal("2 groups each for versions 3 to 4")


def test_in_order_serves_a_step_its_own_groups() -> None:
    rule = InOrder(max_age=1, groups_per_step=2)
    held = [
        group("a", "committed", 3, 4, 0),
        group("b", "committed", 3, 3, 2),
        group("c", "in_flight", 3, 3),
        group("d", "committed", 3, 4, 1),
    ]
    assert [g.uid for g in rule.select(state(3, *held), 2)] == ["b"]
    assert [g.uid for g in rule.select(state(4, *held), 2)] == ["a", "d"]
    assert rule.evict(state(4, *held)) == {"b": "step_passed", "c": "step_passed"}
    assert rule.evict(state(3, group("e", "committed", 2, 4, 0))) == {"e": "too_old"}


@given(version=st.integers(0, 9), starts=st.lists(st.integers(-3, 9), max_size=8), age=st.integers(0, 4))
def test_what_is_left_after_eviction_is_young_enough(version: int, starts: list[int], age: int) -> None:
    groups = [group(str(n), "committed", start, committed=n) for n, start in enumerate(starts)]
    for sampler in (Windowed, WeightFifo):
        rule = sampler(max_age=age, groups_per_step=1)
        gone = rule.evict(state(version, *groups))
        assert set(gone) == {g.uid for g in groups if version - g.start_version > age}


# ---- the configuration ----


class Mine(Windowed):
    """A sampler from outside."""


class NoSampler:
    """Takes the arguments, has no rule."""

    def __init__(self, max_age: int, groups_per_step: int) -> None: ...


def test_every_short_name_builds_its_own_class() -> None:
    built = [type(build(AsyncConfig(sampler=name), 4)) for name in SAMPLERS]
    assert built == [Windowed, ReadyFirst, WeightFifo, InOrder]


def test_a_sampler_by_import_path() -> None:
    assert isinstance(build(AsyncConfig(sampler=f"{__name__}:Mine"), 4), Mine)
    with pytest.raises(ConfigError, match=r"cannot import 'actors\.nowhere:Mine'"):
        build(AsyncConfig(sampler="actors.nowhere:Mine"), 4)
    with pytest.raises(ConfigError, match="lacks one of required_capacity, admit, select and evict"):
        build(AsyncConfig(sampler=f"{__name__}:NoSampler"), 4)


@pytest.mark.parametrize(("sampler", "required"), zip(SAMPLERS, (8, 24, 24, 24), strict=True))
def test_the_buffer_must_hold_what_the_sampler_needs(sampler: str, required: int) -> None:
    def config(capacity: int) -> AsyncConfig:
        return AsyncConfig(sampler=sampler, max_trajectory_age_steps=2, buffer_capacity=capacity)

    assert build(config(required), 8).required_capacity() == required
    with pytest.raises(ConfigError, match=f"buffer_capacity: {required - 1} groups, and sampler '{sampler}' needs {required} .8 groups"):
        build(config(required - 1), 8)


def test_the_default_capacity_is_enough_for_every_sampler() -> None:
    for name in SAMPLERS:
        for age in range(4):
            build(AsyncConfig(sampler=name, max_trajectory_age_steps=age), 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_trajectory_age_steps": 2, "in_flight_weight_updates": False}, "no trajectory can span more than one update"),
        ({"recompute_kv_cache_after_weight_updates": True, "in_flight_weight_updates": False}, "no cache to recompute"),
        ({"max_inflight_prompts": 9, "buffer_capacity": 8}, r"max_inflight_prompts \(9\) is above buffer_capacity \(8\)"),
        ({"stall_timeout_s": 10}, r"stall_report_every_s \(30\) is above stall_timeout_s \(10\)"),
        ({"sampler": "windwed"}, "did you mean 'windowed'"),
        ({"sampler": "my.module"}, "package.module:Name"),
        ({"max_trajectory_age_steps": -1}, "greater than or equal to 0"),
        ({"max_age": 1}, "Extra inputs"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AsyncConfig(**values)


def test_ages_zero_and_one_need_no_in_flight_updates() -> None:
    for age in (0, 1):
        assert AsyncConfig(max_trajectory_age_steps=age, in_flight_weight_updates=False).capacity(6) == 6 * (age + 1)
