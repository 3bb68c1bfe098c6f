"""Guards as a state machine over steps; that an update is not made, tests/actors/policy/test_training.py shows."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policy.limits import beyond, guard_of
from configs.base import ConfigError
from configs.guards import GuardsConfig
from configs.loader import load
from tasks.guards import Guards, GuardsState


def guards(**fields: object) -> Guards:
    return Guards(GuardsConfig.model_validate(fields))


@given(st.floats(allow_nan=True), st.none() | st.floats(-5, 5), st.none() | st.floats(-5, 5))
def test_beyond_is_what_is_not_within(value: float, above: float | None, below: float | None) -> None:
    within = not math.isnan(value) or (above is None and below is None)
    within = within and (above is None or value <= above) and (below is None or value >= below)
    assert bool(beyond({"kl": value}, {"kl": (above, below)})) is not within


def test_what_was_not_reported_trips_nothing() -> None:
    assert beyond({}, {"kl": (0.0, None)}) == []
    assert guard_of("logprob_error/mean") == "logprob_error"


def test_the_gravest_action_counts() -> None:
    found = guards(kl={"above": 1, "action": "skip"}, entropy={"below": 0.1, "action": "roll_back"})
    trip = found.see(7, {"guard/kl": 1.0, "guard/entropy": 1.0, "guard/non_finite": 0.0, "entropy": 0.01})
    assert trip is not None
    assert (trip.guard, trip.action) == ("entropy", "roll_back")
    assert trip.line == "guard entropy: step 7: entropy 0.01; no update was made (roll_back)"


def test_too_many_in_a_row_end_the_run_and_a_good_step_between_them_does_not() -> None:
    found, bad = guards(in_a_row=3), {"guard/non_finite": 1.0}
    for metrics in (bad, bad, {"guard/non_finite": 0.0}, bad, bad):
        found.see(1, metrics)
    trip = found.see(9, bad)
    assert trip is not None
    assert trip.action == "stop"
    assert re.match(r"guard non_finite: step 9: .*as in the 2 steps before \(guards.in_a_row = 3\)", trip.line)
    assert found.state.tripped == {"non_finite": 5}


def test_stop() -> None:
    trip = guards(grad_norm={"above": 10, "action": "stop"}).see(2, {"guard/grad_norm": 1.0, "grad_norm": 900.0})
    assert trip is not None
    assert trip.action == "stop"
    assert re.match(r"guard grad_norm: step 2: grad_norm 900; .*guards.grad_norm.action is stop", trip.line)


def test_a_step_that_made_the_run_go_back_is_skipped_when_it_comes_again() -> None:
    found, bad = guards(entropy={"below": 0.1, "action": "roll_back"}), {"guard/entropy": 1.0, "entropy": 0.01}
    at_the_checkpoint = found.state
    actions = []
    for step in (5, 5, 6):
        trip = found.see(step, bad)
        assert trip is not None
        actions.append(trip.action)
        if trip.action == "roll_back":
            found.go_on_from(at_the_checkpoint)
    assert actions == ["roll_back", "skip", "roll_back"]
    assert (found.state.skipped, found.state.tripped) == (0, {"entropy": 3})


def test_a_reward_that_jumps_is_no_part_of_what_comes_after() -> None:
    found = guards(reward_jump={"window": 4, "deviations": 3, "at_least": 0.2})
    for step, reward in enumerate((0.5, 0.52, 0.48, 0.5)):
        assert found.before_training(step, {"reward/mean": reward}) is None
    trip = found.before_training(5, {"reward/mean": 0.95})
    assert trip is not None
    assert "mean reward 0.95, 0.5 before" in trip.line
    assert found.state.rewards == (0.5, 0.52, 0.48, 0.5)
    assert found.before_training(6, {"reward/mean": 0.6}) is None  # within at_least
    assert found.state.rewards == (0.52, 0.48, 0.5, 0.6)


@given(st.lists(st.floats(0, 1), max_size=40))
def test_a_restored_state_goes_on_as_the_one_it_was_taken_of(rewards: list[float]) -> None:
    found, other = (guards(reward_jump={"window": 5}, in_a_row=100) for _ in range(2))
    for step, reward in enumerate(rewards):
        other.state = GuardsState.model_validate_json(found.state.model_dump_json())
        trips = [one.before_training(step, {"reward/mean": reward}) for one in (found, other)]
        assert trips[0] == trips[1]
        assert found.state == other.state


def test_the_rate_falls_by_the_factor() -> None:
    found = guards(factor=0.5)
    assert (found.lowered(), found.lowered()) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("guards.kl={action: stop}", "set one of `above` and `below`"),
        ("guards.kl={above: 1, below: 0}", "set one of `above` and `below`"),
        ("guards.non_finite.action=ignore", "guards.non_finite.action"),
        ("guards.k1={above: 1}", "did you mean 'kl'"),
        ("guards.logprob_error={above: 1, of: median}", "guards.logprob_error.of"),
    ],
)
def test_nonsense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("arithmetic-cpu", [override])


def test_a_guard_that_could_never_trip_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"guards\.kl would never trip"):
        load("arithmetic-cpu", ["guards.kl={above: 1}", "policy.loss.kl_coef=0"])


def test_limits_go_by_the_trainer_s_metrics() -> None:
    config = GuardsConfig.model_validate({"logprob_error": {"above": 0.05}, "entropy": {"below": 0.01}})
    assert config.limits == {"logprob_error/mean": (0.05, None), "entropy": (None, 0.01)}
    assert GuardsConfig.model_validate({"logprob_error": {"above": 9, "of": "max"}}).limits == {"logprob_error/max": (9, None)}
