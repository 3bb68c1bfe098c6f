"""The level follows measured accuracy, stale groups change nothing, and every level keeps the validation questions out."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.reasoning_gym import ReasoningGymEnvironment
from actors.rollout.curriculum import Curriculum
from actors.rollout.prompts import LEVEL, PromptStream
from configs.base import ConfigError
from configs.curriculum import CurriculumConfig
from configs.environment import EnvironmentConfig
from tests.actors.environments.parrot import Parrot

FIXED = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def config(**changes: Any) -> CurriculumConfig:
    return CurriculumConfig(**({"window": 4} | changes))


def gym(curriculum: CurriculumConfig | None, *, task: str = "chain_sum", **options: Any) -> ReasoningGymEnvironment:
    options = options or FIXED
    config = EnvironmentConfig(task=task, task_options=options, train_size=200, validation_size=40, curriculum=curriculum)
    return ReasoningGymEnvironment(config, seed=3)


def after(curriculum: Curriculum, accuracies: list[float]) -> int:
    for accuracy in accuracies:
        curriculum.observe(curriculum.level, accuracy)
    return curriculum.level


# ---- the state machine ----


@pytest.mark.parametrize(
    ("accuracies", "level"),
    [
        ([1.0] * 3, 1),  # the window is not full
        ([1.0] * 4, 2),
        ([0.75, 0.85, 0.8, 0.8], 2),  # exactly raise_at
        ([0.7, 0.8, 0.8, 0.8], 1),
        ([0.0, 0.8, 0.8, 0.8, 0.8], 2),  # the last four
        ([0.2] * 4, 0),
        ([0.3, 0.2, 0.2, 0.2], 1),
        ([1.0] * 7, 2),  # emptied by a change
        ([1.0] * 8, 3),
        ([1.0] * 99, 5),  # the hardest
        ([0.0] * 99, 0),
    ],
)
def test_the_level_follows_the_mean_of_the_window(accuracies: list[float], level: int) -> None:
    assert after(Curriculum(config(start_level=1), levels=6), accuracies) == level


def test_it_need_not_go_down_and_stops_at_max_level() -> None:
    assert after(Curriculum(config(start_level=2, lower_at=None), 6), [0.0] * 20) == 2
    assert after(Curriculum(config(max_level=3), 6), [1.0] * 99) == 3


def test_groups_of_another_level_change_nothing() -> None:
    curriculum = Curriculum(config(), 6)
    assert after(curriculum, [1.0] * 4) == 1
    before = curriculum.state()
    for _ in range(20):
        curriculum.observe(0, 1.0)  # drawn before the change
    assert curriculum.state() == before
    assert math.isnan(curriculum.accuracy)
    assert curriculum.metrics() == {"curriculum/level": 1.0}
    curriculum.observe(1, 0.5)
    assert curriculum.metrics() == {"curriculum/level": 1.0, "curriculum/accuracy": 0.5}


groups = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8).map(lambda right: right / 8)), max_size=60)


@given(first=groups, then=groups, start=st.integers(0, 4), window=st.integers(1, 5), lower_at=st.sampled_from([None, 0.0, 0.25]))
def test_a_restored_curriculum_goes_on_alike(first: Any, then: Any, start: int, window: int, lower_at: float | None) -> None:
    settings = CurriculumConfig(start_level=start, window=window, lower_at=lower_at, raise_at=0.75)
    whole, levels = Curriculum(settings, 5), []
    for level, accuracy in first:
        before = whole.level
        whole.observe(level, accuracy)
        assert 0 <= whole.level <= 4
        assert abs(whole.level - before) <= (level == before)
        assert lower_at is not None or whole.level >= before
    restored = Curriculum(settings, 5)
    restored.restore(json.loads(json.dumps(whole.state())))
    for level, accuracy in then:
        for curriculum in (whole, restored):
            curriculum.observe(level, accuracy)
        levels.append((whole.level, restored.level))
        assert whole.state() == restored.state()
    assert all(left == right for left, right in levels)


def test_what_no_curriculum_can_be() -> None:
    for wrong in ({"raise_at": 0.2}, {"raise_at": 1.5}, {"window": 0}, {"start_level": 3, "max_level": 2}, {"raise_ad": 0.5}):
        with pytest.raises(ValueError, match=r"raise_at|window|start_level|raise_ad"):
            config(**wrong)
    with pytest.raises(ConfigError, match=r"curriculum\.start_level: 6 is above 5"):
        Curriculum(config(start_level=6), 6)
    with pytest.raises(ConfigError, match=r"curriculum\.max_level: 9 is above 5"):
        Curriculum(config(max_level=9), 6)
    with pytest.raises(ConfigError, match="the run to resume is at level 4, above 3"):
        Curriculum(config(max_level=3), 6).restore({"level": 4, "accuracies": []})
    for accuracy in (math.nan, -0.1, 1.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            Curriculum(config(), 6).observe(0, accuracy)


# ---- reasoning_gym's levels ----


def test_a_level_sets_the_options_of_the_raised_attributes() -> None:
    """chain_sum's curriculum: num_terms from 2 and num_digits from 1, each up to level + its first value."""
    every = gym(config())
    assert every.levels == 11  # 2 to 12 terms
    for level in (0, 1, 4):
        seen = [every.problem_at(level, "train", index).columns["metadata"] for index in range(100)]
        assert {entry["num_terms"] for entry in seen} == set(range(2, level + 3))
        assert {entry["num_digits"] for entry in seen} == set(range(1, level + 2))
    terms = gym(config(attributes=("num_terms",)))
    assert {terms.problem_at(4, "train", index).columns["metadata"]["num_digits"] for index in range(100)} == {1}


def test_held_out_questions_stay_out_at_every_level_and_are_the_same() -> None:
    plain, raised = gym(None), gym(config())
    held_out = [plain.problem("validation", index) for index in range(40)]
    assert held_out == [raised.problem_at(5, "validation", index) for index in range(40)]
    questions = {problem.question for problem in held_out}
    for level in range(3):
        assert not questions & {raised.problem_at(level, "train", index).question for index in range(200)}


def test_without_a_curriculum_the_problems_are_reasoning_gyms_own() -> None:
    plain = gym(None)
    upstream = reasoning_gym.create_dataset("chain_sum", seed=3, size=400, **FIXED)
    held_out = {plain.problem("validation", index).question for index in range(40)}
    for index in range(100):
        problem = plain.problem("train", index)
        assert (problem.uid, problem.source, problem.messages) == (f"t{index}", "chain_sum", None)
        assert upstream[index]["question"] in held_out or problem.columns == upstream[index] | {"config": problem.columns["config"]}
        assert (problem.question, problem.answer) == (problem.columns["question"], problem.columns["answer"])
    assert plain.levels == 1
    with pytest.raises(IndexError, match="level 1 of 1"):
        plain.problem_at(1, "train", 0)


def test_uids_differ_between_levels() -> None:
    raised = gym(config(start_level=2))
    assert raised.problem("train", 7) == raised.problem_at(2, "train", 7)
    assert Counter(raised.problem_at(level, "train", index).uid for level in range(3) for index in range(20)).most_common(1)[0][1] == 1
    for split in ("train", "validation"):
        with pytest.raises(IndexError):
            raised.problem(split, raised.size(split))


def test_a_problem_that_the_generator_fails_to_make_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """letter_jumble fails when it wants more consecutive words than its text has of this length."""
    options = {"min_words": 1, "max_words": 60, "min_word_len": 14}
    upstream, failing = reasoning_gym.create_dataset("letter_jumble", seed=3, size=400, **options), []
    for index in range(40):
        try:
            upstream[index]
        except ValueError:
            failing.append(index)
    assert failing
    letter_jumble = EnvironmentConfig(task="letter_jumble", task_options=options, train_size=200, validation_size=1)
    env = ReasoningGymEnvironment(letter_jumble, seed=3)
    assert all(env.problem("train", index).question for index in range(40))
    assert "letter_jumble, level 0: problems that it fails to make are replaced: ValueError" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("task", "options", "changes", "message"),
    [
        ("list_functions", {}, {}, "has no curriculum for 'list_functions'"),
        ("chain_sum", FIXED, {"attributes": ("num_turms",)}, r"no 'num_turms'; near it: num_terms, num_digits"),
        ("caesar_cipher", {}, {}, r"level 2 of reasoning_gym's 'caesar_cipher' .* max_level"),
        ("chain_sums", {}, {}, "near it: chain_sum"),
        ("letter_jumble", {"min_words": 500, "max_words": 500, "min_word_len": 14}, {}, "validation problem 0"),
        ("chain_sum", {"min_turms": 1}, {}, "task_options"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(task: str, options: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    wrong = EnvironmentConfig(task=task, task_options=options, train_size=9, validation_size=2, curriculum=config(**changes))
    with pytest.raises(ConfigError, match=message):
        ReasoningGymEnvironment(wrong, seed=0)


def test_levels_that_are_never_reached_need_not_work() -> None:
    assert gym(config(max_level=1), task="caesar_cipher", min_words=3).levels == 4


# ---- in the stream ----


def test_the_stream_draws_at_the_level_and_takes_it_along() -> None:
    stream = PromptStream(gym(config(window=2)), 0, curriculum=config(window=2))
    stale = [problem for _, problem in stream.draw(4)]
    for problem in stale:
        stream.observe(problem, 1.0)  # the last two come too late: the level has changed
    assert [problem.columns[LEVEL] for problem in stale] == [0] * 4
    assert stream.metrics()["curriculum/level"] == 1
    (_, problem), *_ = stream.draw(1)
    assert problem.columns[LEVEL] == 1
    stream.observe(problem, 0.5)

    resumed = PromptStream(gym(config(window=2)), 0, curriculum=config(window=2))
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.metrics() == stream.metrics()
    assert resumed.draw(5) == stream.draw(5)


def test_a_curriculum_wants_levels_and_stays_with_its_run() -> None:
    with pytest.raises(ConfigError, match=r"environment\.curriculum: these problems have no levels"):
        PromptStream(Parrot(words=["a"]), 0, curriculum=config())
    with_one, without = PromptStream(gym(config()), 0, curriculum=config()), PromptStream(gym(None), 0)
    without.observe(without.draw(1)[0][1], 1.0)  # nothing to tell
    with pytest.raises(ConfigError, match="had no curriculum"):
        with_one.restore(without.state())
    with pytest.raises(ConfigError, match="had a curriculum"):
        without.restore(with_one.state())
