"""From raw values to what a response is paid, and when too many have nothing: against plain re-statements of the rules."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.scoring.verdict import OUTCOMES, Part, ScoringError, Tolerance, Verdict, combine, metrics, part_of
from configs.rewards import Consequence, ExactReward, ScoringConfig

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)
SCORED = st.builds(Part, st.none() | FINITE, st.just("scored"), st.floats(0, 10))
LOST = st.builds(Part, st.none(), st.sampled_from(["failed", "timed_out"]), st.floats(0, 10), st.sampled_from(["why", "because"]))
DROPPED = {"zero": "no", "drop_sample": "sample", "drop_group": "group"}


@st.composite
def cases(draw: st.DrawFn, part: st.SearchStrategy[Part] = SCORED | LOST) -> tuple[dict[str, Part], list[ExactReward], ScoringConfig]:
    labels = [f"r{i}" for i in range(draw(st.integers(1, 4)))]
    config = ScoringConfig(
        success=draw(st.none() | st.sampled_from(labels)),
        success_threshold=draw(st.sampled_from([0.0, 0.5, 1.0])),
        on_failed=draw(st.sampled_from(sorted(DROPPED))),
        on_timed_out=draw(st.sampled_from(sorted(DROPPED))),
    )
    return {label: draw(part) for label in labels}, [ExactReward(name=label, weight=draw(FINITE)) for label in labels], config


@given(cases())
def test_a_verdict_follows_from_its_parts(case: tuple[dict[str, Part], list[ExactReward], ScoringConfig]) -> None:
    parts, rewards, config = case
    verdict = combine(parts, rewards, config)
    outcomes = [part.outcome for part in parts.values()]
    opinions = {label: part.value for label, part in parts.items() if part.value is not None}
    if "timed_out" in outcomes:
        assert (verdict.outcome, verdict.drop) == ("timed_out", DROPPED[config.on_timed_out])
    elif "failed" in outcomes or not opinions:
        assert (verdict.outcome, verdict.drop) == ("failed", DROPPED[config.on_failed])
    else:
        assert (verdict.outcome, verdict.drop, verdict.error) == ("scored", "no", "")
        exact = sum(Fraction(reward.weight) * Fraction(opinions[reward.label]) for reward in rewards if reward.label in opinions)
        size = sum(abs(reward.weight * opinions[reward.label]) for reward in rewards if reward.label in opinions)
        assert abs(Fraction(verdict.reward) - exact) <= Fraction(1e-15) * (1 + Fraction(size))
        said = opinions.get(config.success) if config.success else next(iter(opinions.values()))
        assert verdict.success == (None if said is None else said >= config.success_threshold)
    if verdict.outcome != "scored":
        assert (verdict.reward, verdict.success) == (0.0, False)
        assert verdict.error
    assert verdict.seconds == pytest.approx(sum(part.seconds for part in parts.values()))


def test_the_error_names_the_reward() -> None:
    parts = {"a": Part(1.0), "b": Part(None, "failed", 0.1, "ValueError: x"), "c": Part(None, "timed_out", 2.0, "no value within 2 s")}
    rewards = [ExactReward(name=name) for name in parts]
    verdict = combine(parts, rewards, ScoringConfig())
    assert (verdict.outcome, verdict.error) == ("timed_out", "b: ValueError: x")
    silent = combine({"a": Part(None)}, rewards[:1], ScoringConfig())
    assert (silent.outcome, silent.error) == ("failed", "a: no reward has an opinion")


def test_a_reward_of_weight_zero_is_only_logged_but_may_say_what_is_right() -> None:
    rewards = [ExactReward(name="right", weight=0), ExactReward(name="form", weight=0.5)]
    verdict = combine({"right": Part(1.0), "form": Part(-1.0)}, rewards, ScoringConfig(success="right"))
    assert (verdict.reward, verdict.success) == (-0.5, True)


@pytest.mark.parametrize(("value", "plain"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (-3.0, -3.0), (np.float64(0.25), 0.25), (10**9, 1e9)])
def test_numbers(value: object, plain: float) -> None:
    part = part_of(value, 0.5)
    assert part == Part(plain, "scored", 0.5)
    assert type(part.value) is float


def test_no_opinion() -> None:
    assert part_of(None, 0.5) == Part(None, "scored", 0.5)


NO_NUMBERS = [
    float("nan"), float("inf"), float("-inf"), "1.0", b"1", [1.0], (), {}, 1j, object(), np.float32("nan"), np.array([1.0]), Fraction(1),
    10**400, -(10**5000),
]  # fmt: skip


@pytest.mark.parametrize("value", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_everything_else_is_a_failure_that_says_what_came(value: object) -> None:
    part = part_of(value, 0.5)
    assert (part.value, part.outcome, part.seconds) == (None, "failed", 0.5)
    assert part.error.startswith("returned ")
    assert len(part.error) < 200


def verdicts_of(outcomes: list[bool]) -> list[Verdict]:
    good = Verdict(1.0, "scored", True, "no", {"a": Part(1.0)})
    bad = Verdict(0.0, "failed", False, "no", {"a": Part(None, "failed", 0.0, "why")})
    return [good if outcome else bad for outcome in outcomes]


@given(st.lists(st.lists(st.booleans(), max_size=8), max_size=12), st.integers(1, 12), st.sampled_from([0.0, 0.25, 0.5, 0.99, 1.0]))
def test_a_run_ends_when_too_many_of_the_last_responses_have_no_reward(batches: list[list[bool]], window: int, tolerance: float) -> None:
    counted = Tolerance(ScoringConfig(tolerance=tolerance, tolerance_window=window))
    seen: list[bool] = []
    for batch in batches:
        seen += batch
        last = seen[-window:]
        if len(last) == window and last.count(False) > tolerance * window:
            with pytest.raises(ScoringError, match=rf"{last.count(False)} of the last {window} .*scoring\.tolerance"):
                counted.add(verdicts_of(batch))
        else:
            counted.add(verdicts_of(batch))


def test_the_error_of_a_run_names_what_was_most_often_and_the_last() -> None:
    counted = Tolerance(ScoringConfig(tolerance=0.5, tolerance_window=4))
    wrong = [Verdict(0.0, "failed", False, "no", {"judge": Part(None, "failed", 0.0, why)}) for why in ("refused", "refused", "down")]
    with pytest.raises(
        ScoringError, match=r"3 of the last 4 .*most often \(2 times\): failed: judge: refused\. The last: failed: judge: down"
    ):
        counted.add([*verdicts_of([True]), *wrong])


@given(st.lists(st.tuples(st.sampled_from(["zero", "drop_sample", "drop_group"]), SCORED | LOST, SCORED | LOST), min_size=1, max_size=20))
def test_metrics_count_every_outcome(rows: list[tuple[Consequence, Part, Part]]) -> None:
    rewards = [ExactReward(name="a"), ExactReward(name="b")]
    verdicts = [combine({"a": a, "b": b}, rewards, ScoringConfig(on_failed=what, on_timed_out=what)) for what, a, b in rows]
    found, n = metrics(verdicts), len(rows)
    for label in ("a", "b"):
        parts = [verdict.parts[label] for verdict in verdicts]
        values = [part.value for part in parts if part.value is not None]
        assert (f"rewards/{label}/mean" in found) == bool(values)
        if values:
            assert found[f"rewards/{label}/mean"] == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-9)
        fractions = [found[f"rewards/{label}/{what}"] for what in ("timed_out", "failed", "no_opinion")]
        assert fractions[0] == np.mean([part.outcome == "timed_out" for part in parts])
        assert sum(fractions) + len(values) / n == pytest.approx(1.0)
    lost = [verdict for verdict in verdicts if verdict.outcome != "scored"]
    assert found["scoring/timed_out"] + found["scoring/failed"] == pytest.approx(len(lost) / n)
    assert found["scoring/dropped"] == sum(verdict.drop != "no" for verdict in verdicts) / n
    assert found["scoring/slowest_s"] == max(verdict.seconds for verdict in verdicts)


def test_metrics_of_nothing() -> None:
    assert metrics([]) == {}


def test_outcomes_are_all_counted() -> None:
    one: list[Any] = [Verdict(0.0, outcome, None, "no", {"a": Part(None, outcome)}) for outcome in OUTCOMES]
    found = metrics(one)
    assert {found[f"rewards/a/{what}"] for what in ("timed_out", "failed", "no_opinion")} == {1 / 3}


@pytest.mark.parametrize("value", [1e308, -1e308, 2e9, 10**400, -(10**400), float("inf"), float("nan")])
def test_a_value_that_no_sum_bears_is_no_value(value: float) -> None:
    part = part_of(value, 0.5)
    assert (part.value, part.outcome) == (None, "failed")
    verdicts = [
        combine({"exact": part}, [ExactReward()], ScoringConfig()),
        combine({"exact": Part(1e9)}, [ExactReward(weight=1e6)], ScoringConfig()),
    ]
    assert all(math.isfinite(verdict.reward) for verdict in verdicts)
    assert all(math.isfinite(number) for number in metrics(verdicts).values())
