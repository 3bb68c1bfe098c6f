"""Rewards in a recipe: what may be set, what is refused by name, and what a recipe that lists none gets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from configs.environment import EnvironmentConfig
from configs.rewards import AnyReward, ExactReward, LengthReward, RegexReward, ScoringConfig
from configs.run import ScoredConfig

ANY: TypeAdapter[Any] = TypeAdapter(AnyReward)
WHOLE = [
    {"kind": "exact", "pattern": "#### (.*)", "ignore": ",$", "ignore_case": True}, {"kind": "regex", "pattern": "<think>", "full": True},
    {"kind": "json_schema", "json_schema": {"type": "object"}}, {"kind": "math"}, {"kind": "reasoning_gym", "answer_pattern": r"\d+"},
    {"kind": "length", "cache_tokens": 10, "max_tokens": 10}, {"kind": "python", "import_path": "a.b:C", "options": {"x": 1}},
    {"kind": "environment"}, {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "m"},
]  # fmt: skip


@pytest.mark.parametrize("values", WHOLE, ids=lambda values: values["kind"])
def test_every_kind_is_made_by_its_name_and_survives_a_copy(values: dict[str, Any]) -> None:
    made = ANY.validate_python(values)
    assert made.label == values["kind"]
    assert ANY.validate_python(values | {"name": "Own_1"}).label == "Own_1"
    assert ANY.validate_json(ANY.dump_json(made)) == made
    for wrong in (
        {"weigth": 1},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"timeout_s": 0},
        {"name": "a b"},
        {"name": "1"},
        {"name": "a\n"},
    ):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            ANY.validate_python(values | wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "exakt"}, "exakt"), ({}, "kind"), ({"kind": "exact", "pattern": "("}, "no regular expression"),
        ({"kind": "regex"}, "pattern"),
        ({"kind": "regex", "pattern": "["}, "no regular expression"),
        ({"kind": "reasoning_gym", "answer_pattern": "*"}, "no regular expression"),
        ({"kind": "length", "cache_tokens": 0}, "cache_tokens"),
        ({"kind": "length", "cache_tokens": 9, "max_tokens": 8}, r"cache_tokens \(9\) is above max_tokens \(8\)"),
        ({"kind": "python", "import_path": "a.b.C"}, "package.module:function"),
        ({"kind": "python", "import_path": "a:b.c"}, "package.module:function"),
        ({"kind": "python", "import_path": "a:b()"}, "package.module:function"),
        ({"kind": "python", "import_path": "a:b\n"}, "package.module:function"),
        ({"kind": "judge", "url": "ftp://h", "model": "m"}, "url"),
        ({"kind": "judge", "url": "http://me:pw@h/v1", "model": "m"}, "api_key"),
        ({"kind": "judge", "url": "http://h/v1", "model": "m", "api_key": "sk-123"}, "by reference"),
        ({"kind": "json_schema", "json_schema": []}, "json_schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ANY.validate_python(values)


@pytest.mark.parametrize("name", ["A=1", "1A", "A B", "", "sécret=x"])
def test_the_environment_is_given_by_names_alone(name: str) -> None:
    with pytest.raises(ValidationError, match="environment_variables"):
        ScoringConfig(environment_variables=(name,))


@pytest.mark.parametrize(
    "values", [{"processes": 0}, {"tolerance": 1.1}, {"tolerance": -0.1}, {"tolerance_window": 0}, {"on_failed": "raise"}]
)
def test_scoring_is_bounded(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        ScoringConfig(**values)


def test_a_recipe_without_rewards_gets_the_verifiers_of_its_environment() -> None:
    files, code = EnvironmentConfig(kind="dataset", path="a.jsonl"), EnvironmentConfig(kind="python", import_path="a:B")
    sources = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "task": "chain_sum"}, {"name": "c", "path": "c.jsonl"}]
    mixture = EnvironmentConfig.model_validate({"sources": sources})
    assert [reward.kind for reward in ScoredConfig(environment=files).paid] == ["math"]
    assert [reward.kind for reward in ScoredConfig(environment=code).paid] == ["environment"]
    assert [reward.kind for reward in ScoredConfig(environment=mixture).paid] == ["math", "reasoning_gym"]
    listed = (ExactReward(),)
    assert ScoredConfig(environment=files, rewards=listed).paid == listed
    lengths = (LengthReward(), LengthReward(name="longer", max_tokens=9))
    assert [reward.label for reward in ScoredConfig(environment=files, rewards=lengths).paid] == ["math", "length", "longer"]
    assert ScoredConfig(environment=files, rewards=(*lengths, *listed)).paid == (*lengths, *listed)


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=4), st.none() | st.sampled_from(["a", "b", "e"]))
def test_labels_are_unique_and_the_success_is_one_of_them(names: list[str], success: str | None) -> None:
    rewards = tuple(ExactReward(name=name) for name in names)
    if len(set(names)) == len(names) and (success is None or success in names):
        ScoredConfig(rewards=rewards, scoring=ScoringConfig(success=success))
    else:
        with pytest.raises(ValueError, match=r"rewards: two are called|scoring\.success: no reward"):
            ScoredConfig(rewards=rewards, scoring=ScoringConfig(success=success))


def test_a_near_miss_is_suggested() -> None:
    rewards = (ExactReward(), RegexReward(pattern="x", name="form"))
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        ScoredConfig(rewards=rewards, scoring=ScoringConfig(success="exakt"))
    with pytest.raises(ValueError, match="they are exact, form"):
        ScoredConfig(rewards=rewards, scoring=ScoringConfig(success="zzz"))
    with pytest.raises(ValueError, match="two are called 'exact'"):
        ScoredConfig(rewards=(ExactReward(), RegexReward(pattern="x", name="exact")))
