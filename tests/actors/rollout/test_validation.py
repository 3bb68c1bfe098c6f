"""Requests of validation, what is counted of the answers, and under which names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.environments import Environment, Problem, Split
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Part, Verdict, combine
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult
from actors.models.scratch_model import write_scratch_model
from actors.rollout.in_flight import seeded_request
from actors.rollout.prompts import PromptEncoder
from actors.rollout.samples import Sample, SlowSample, Validation, slowest
from actors.rollout.statistics import Tally, accuracy
from actors.rollout.validation import Validator
from configs.model import ModelConfig
from configs.rewards import ExactReward, LengthReward, ScoringConfig
from configs.validation import ValidationConfig

SMALL = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=300)
SIZE = 5


class Sums(Environment):
    """0 + i of two sources."""

    def size(self, split: Split) -> int:
        return SIZE

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(uid=f"v{index}", question=f"0 + {index} = ", answer=str(index), source=("odd", "even")[index % 2 == 0])

    def score(self, problem: Problem, response: str) -> float:
        return float(response == problem.answer)


class ScriptedEngines:
    """Stands where engines do: answers each request with the number that its seed and length say, and keeps the requests."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self.asked: list[GenerationRequest] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self.asked += requests
        results = []
        for request in requests:
            ids = self._encoder.tokenizer.encode(str(request.seed % 2), add_special_tokens=False)
            reason: Any = "length" if request.seed % 3 == 0 else "stop"
            results.append(GenerationResult(request.request_id, ids, [0.0] * len(ids), reason, ((7, len(ids)),)))
        return results


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(str(write_scratch_model(tmp_path_factory.mktemp("scratch"), SMALL, ["0 + 1 = 1"], seed=0)), None)


def verdicts(problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
    rewards = [ExactReward()]
    return [
        combine({"exact": Part(float(response.text == problem.answer), seconds=0.5)}, rewards, ScoringConfig())
        for problem, response in zip(problems, responses, strict=True)
    ]


def validator(encoder: PromptEncoder, engines: ScriptedEngines, rows: int = 1) -> Validator:
    return Validator(
        Sums(), encoder, cast(EnginePool, engines), verdicts, seed=3, max_new_tokens=4, temperature=0.7, samples_per_prompt=rows
    )


@pytest.mark.parametrize("parts", [1, 2, 3, SIZE + 2])
def test_parts_are_together_as_one(encoder: PromptEncoder, parts: int) -> None:
    one = validator(encoder, ScriptedEngines(encoder), rows=2)
    found = [group for part in range(parts) for group in one.answers(0, part, parts)]
    assert found == one.answers(0)


def test_one_answer_to_each_problem_asks_as_it_always_did(encoder: PromptEncoder) -> None:
    engines, environment = ScriptedEngines(encoder), Sums()
    answers = validator(encoder, engines).answers(9)
    problems = [environment.problem("validation", i) for i in range(SIZE)]
    assert engines.asked == [seeded_request(3, problem.uid, encoder.prompt(problem), 4, 0.7, 1.0) for problem in problems]
    assert [group[0].uid for group in answers] == [f"v{i}" for i in range(SIZE)]
    assert {len(group) for group in answers} == {1}
    sample, asked = answers[1][0], engines.asked[1]
    assert (sample.prompt, sample.answer, sample.response) == ("0 + 1 = ", "1", str(asked.seed % 2))
    assert (sample.success, sample.reward) == (asked.seed % 2 == 1, float(asked.seed % 2 == 1))
    assert (sample.tokens, sample.truncated, sample.weight_version) == (1, asked.seed % 3 == 0, 9)
    assert (sample.rewards, sample.outcome, sample.seconds, sample.source) == ({"exact": sample.reward}, "scored", 0.5, "odd")


def test_more_answers_leave_the_first_as_it_is_and_have_seeds_of_their_own(encoder: PromptEncoder) -> None:
    one, four = ScriptedEngines(encoder), ScriptedEngines(encoder)
    first, answers = validator(encoder, one).answers(0), validator(encoder, four, rows=4).answers(0)
    assert [group[0] for group in answers] == [group[0] for group in first]
    assert four.asked[::4] == one.asked
    assert [request.request_id for request in four.asked[:5]] == ["v0", "v0#1", "v0#2", "v0#3", "v1"]
    assert len({request.seed for request in four.asked}) == 4 * SIZE
    assert [len(group) for group in answers] == [4] * SIZE
    assert all(sample.uid == f"v{i}" for i, group in enumerate(answers) for sample in group)


def sample(uid: str = "v0", success: bool | None = True, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "uid": uid, "source": "", "prompt": "p", "response": "r", "answer": "a", "reward": float(success or 0), "success": success,
        "outcome": "scored", "rewards": {}, "tokens": 10, "truncated": False, "seconds": 0.0, "label": "exact", "error": "",
        "weight_version": 0,
    }  # fmt: skip
    return Sample(**fields | changes)


GROUPS = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.sampled_from([True, False, None]), min_size=k, max_size=k), min_size=1, max_size=8)
)


@given(GROUPS)
def test_what_is_counted_adds_up(successes: list[list[bool | None]]) -> None:
    k = len(successes[0])
    answers = [[sample(f"v{i}", success, source=f"s{i % 2}") for success in group] for i, group in enumerate(successes)]
    found = Validation.of(answers, ValidationConfig(samples_per_prompt=k), shown=2)
    flat = [success for group in successes for success in group]
    assert (found.count, found.problems, found.no_opinion) == (len(flat), len(successes), flat.count(None))
    judged = [[one for one in group if one is not None] for group in successes]
    rates = [sum(group) / len(group) for group in judged if group]
    assert found.accuracy == pytest.approx(sum(rates) / len(rates) if rates else 0.0)
    assert found.low <= found.accuracy <= found.high
    assert found.reward == pytest.approx(flat.count(True) / len(flat))
    if all(len(group) == k for group in judged):
        assert found.pass_at[1] == pytest.approx(found.accuracy)
        assert list(found.pass_at) == [one for one in (1, 2, 4) if one <= k]
    assert sum(scores.problems for scores in found.per_source.values()) == found.problems
    assert [one.uid for one in found.samples] == [f"v{i}" for i in range(min(2, len(successes)))]
    assert found.gain(found).value == 0.0
    assert Validation.model_validate_json(found.model_dump_json()) == found


def test_metrics_of_the_environments_own_set_and_of_others() -> None:
    answers = [[sample("v0", True), sample("v0", False)], [sample("v1", False, tokens=30, truncated=True)] * 2]
    found = Validation.of(answers, ValidationConfig(samples_per_prompt=2), shown=1)
    interval = accuracy([Tally(2, 1), Tally(2, 0)], 0.95)
    assert found.metrics() == {
        "accuracy/validation": 0.25, "accuracy/validation/low": interval.low, "accuracy/validation/high": interval.high,
        "reward/validation": 0.25, "pass@1/validation": 0.25, "pass@2/validation": 0.5, "mean@2/validation": 0.25,
        "length/validation": 20.0, "truncated/validation": 0.5, "timed_out/validation": 0.0, "failed/validation": 0.0,
        "no_opinion/validation": 0.0,
    }  # fmt: skip
    assert {name.replace("/gsm8k", "/validation") for name in found.metrics("gsm8k")} == set(found.metrics())


def test_sources_have_accuracies_of_their_own_when_there_are_several() -> None:
    answers = [[sample("v0", True, source="a")], [sample("v1", False, source="b")], [sample("v2", True, source="b")]]
    found = Validation.of(answers, ValidationConfig(), shown=1)
    assert (found.metrics()["accuracy/validation/a"], found.metrics()["accuracy/validation/b"]) == (1.0, 0.5)
    assert found.per_source["b"].problems == 2
    # A source of that name cannot pass for an end of the interval.
    odd = Validation.of([[sample(source="low")], [sample(source="high")]], ValidationConfig(), shown=1)
    assert odd.metrics()["accuracy/validation/low"] == odd.low < 1.0


def test_outcomes_are_counted_and_are_wrong_answers() -> None:
    late = combine({"exact": Part(None, "timed_out", 10.0, "no answer within 10 s")}, [ExactReward()], ScoringConfig())
    broken = combine({"exact": Part(None, "failed", 0.1, "raised\nValueError: " + "x" * 10_000)}, [ExactReward()], ScoringConfig())
    response, problem = Response("r", 3, False), Problem("v0", "q", "a")
    answers = [[Sample.of(problem, response, verdict, 0)] for verdict in (late, broken, broken)]
    found = Validation.of(answers, ValidationConfig(), shown=8, slow=1)
    assert (found.timed_out, found.failed, found.no_opinion, found.accuracy, found.reward) == (1, 2, 0, 0.0, 0.0)
    assert [(one.uid, one.label, one.outcome, one.seconds) for one in found.slowest] == [
        ("v0", "exact", "timed_out", 10.0), ("v0", "exact", "failed", 0.1)
    ]  # fmt: skip
    error = answers[1][0].error
    assert error.startswith("exact: raised ValueError: xxx")
    assert len(error) == 300


def test_the_slowest_names_the_reward_that_has_no_value_or_took_longest() -> None:
    rewards = [ExactReward(), LengthReward(cache_tokens=2)]
    parts = {"exact": Part(1.0, seconds=0.1), "length": Part(0.0, seconds=0.3)}
    slow = SlowSample.of("v1", combine(parts, rewards, ScoringConfig()))
    assert (slow.label, slow.outcome, slow.error) == ("length", "scored", "")
    assert slow.seconds == pytest.approx(0.4)
    parts["exact"] = Part(None, "failed", 0.01, "raised")
    assert SlowSample.of("v1", combine(parts, rewards, ScoringConfig())).label == "exact"
    assert SlowSample.of("v1", combine({}, rewards, ScoringConfig())).label == ""


SLOW = st.builds(
    SlowSample,
    uid=st.text(max_size=2),
    label=st.sampled_from(["a", "b"]),
    seconds=st.floats(0, 9),
    outcome=st.sampled_from(["scored", "failed", "timed_out"]),
)


@given(st.lists(SLOW, max_size=20), st.integers(0, 5))
def test_the_slowest_are_kept_and_one_of_each_kind_of_failure(found: list[SlowSample], count: int) -> None:
    kept = slowest(found, count)
    seconds = sorted((one.seconds for one in found), reverse=True)
    assert [one.seconds for one in kept] == sorted((one.seconds for one in kept), reverse=True)
    assert all(value in [one.seconds for one in kept] for value in seconds[:count])
    assert {(one.label, one.outcome) for one in found if one.outcome != "scored"} <= {(one.label, one.outcome) for one in kept}
    assert len(kept) <= count + 4


def test_what_is_kept_of_a_validation_is_small() -> None:
    answers = [[sample(f"jsonl:{i}", bool(i % 3))] for i in range(1000)]
    assert len(json.dumps(Validation.of(answers, ValidationConfig(), shown=8).model_dump(mode="json"))) < 10_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pass_k": [1, 8], "samples_per_prompt": 4}, "pass@8 needs as many answers"),
        ({"sets": {"validation": {}}}, "names metrics of the run itself"),
        ({"sets": {"a/b": {}}}, "is no name"),
        ({"confidence": 1.0}, "less than 1"),
        ({"samples_per_prompt": 0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ValidationConfig(**values)


def test_which_k() -> None:
    assert [ValidationConfig(samples_per_prompt=n).ks for n in (1, 2, 3, 8, 10)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8)]
    assert ValidationConfig(samples_per_prompt=6, pass_k=(5, 3, 3)).ks == (3, 5)
    ValidationConfig().check_temperature(0.0, "rollout.validation_temperature")
    with pytest.raises(ValueError, match=r"set rollout\.validation_temperature above 0"):
        ValidationConfig(samples_per_prompt=2).check_temperature(0.0, "rollout.validation_temperature")
