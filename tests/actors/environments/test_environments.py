"""Problems are reproducible, held-out ones stay held out, and bad sources are refused by name."""

import json

import pytest

from actors.environments import build
from configs.base import ConfigError
from configs.environment import EnvironmentConfig

OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(**changes) -> EnvironmentConfig:
    values = {"task": "chain_sum", "task_options": OPTIONS, "train_size": 200, "validation_size": 40}
    return EnvironmentConfig(**(values | changes))


def test_the_same_seed_gives_the_same_problems() -> None:
    first, second, other = build(gym(), 3), build(gym(), 3), build(gym(), 4)
    questions = [[env.problem("train", i).question for i in range(50)] for env in (first, second, other)]
    assert questions[0] == questions[1] != questions[2]


def test_no_training_question_is_a_validation_question() -> None:
    env = build(gym(), 0)
    held_out = {env.problem("validation", i).question for i in range(env.size("validation"))}
    trained = {env.problem("train", i).question for i in range(env.size("train"))}
    assert len(held_out) > 20
    assert not held_out & trained


def test_right_and_wrong_answers() -> None:
    env = build(gym(), 0)
    problem = env.problem("train", 0)
    assert env.correct(env.score(problem, f" {problem.answer} "))
    for wrong in ("", "no idea", "99999", "\x00"):
        assert env.score(problem, wrong) < 1


def test_the_last_match_of_a_pattern_is_the_answer() -> None:
    env = build(gym(answer_pattern=r"-?\d+"), 0)
    problem = env.problem("train", 0)
    assert env.correct(env.score(problem, f"First 99999. So the answer is {problem.answer}."))
    assert not env.correct(env.score(problem, f"It is {problem.answer}, or 99999."))
    assert env.score(problem, "no number") < 1
    with pytest.raises(ValueError, match="no regular expression"):
        gym(answer_pattern="(")


def test_uids_are_unique_and_indices_bounded() -> None:
    env = build(gym(), 0)
    assert len({env.problem("train", i).uid for i in range(200)}) == 200
    for split in ("train", "validation"):
        with pytest.raises(IndexError):
            env.problem(split, env.size(split))


def test_a_validation_set_that_leaves_nothing_to_train_on() -> None:
    env = build(gym(task_options=OPTIONS | {"max_digits": 1}, validation_size=20_000), 0)
    with pytest.raises(ConfigError, match="nothing is left to train on"):
        [env.problem("train", index) for index in range(200)]


def test_unknown_task_and_options() -> None:
    with pytest.raises(ConfigError, match="chain_sum"):
        build(gym(task="chain_sums"), 0)
    with pytest.raises(ConfigError, match="task_options"):
        build(gym(task_options={"min_turms": 2}), 0)


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_holds_out_the_last_lines_and_checks_mathematics(tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"{i} + {i}", "answer": str(2 * i)} for i in range(10)])
    env = build(EnvironmentConfig(kind="jsonl", path=path, validation_size=3), 0)
    assert (env.size("train"), env.size("validation")) == (7, 3)
    assert env.problem("validation", 0).question == "7 + 7"
    problem = env.problem("train", 2)
    assert env.score(problem, "4") == 1
    assert env.score(problem, r"The answer is $\frac{8}{2}$") == 1
    assert env.score(problem, "5") == 0
    assert env.score(problem, "") == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), ("\n\n", "empty"), ("{broken\n", "line 1"), ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n', "line 2")],
)
def test_jsonl_bad_files(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(EnvironmentConfig(kind="jsonl", path=str(path), validation_size=1), 0)


def test_jsonl_missing_file_and_too_short(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        build(EnvironmentConfig(kind="jsonl", path=str(tmp_path / "none.jsonl")), 0)
    path = write(tmp_path / "short.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(ConfigError, match="validation_size"):
        build(EnvironmentConfig(kind="jsonl", path=path, validation_size=5), 0)


def test_a_class_of_the_users_own() -> None:
    env = build(EnvironmentConfig(kind="python", import_path="tests.actors.environments.parrot:Parrot", options={"words": ["ab", "cd"]}), 0)
    assert env.score(env.problem("train", 1), "cd") == 1
    with pytest.raises(ConfigError, match="cannot import"):
        build(EnvironmentConfig(kind="python", import_path="tests.actors.environments.parrot:Polly"), 0)
    with pytest.raises(ConfigError, match="does not derive"):
        build(EnvironmentConfig(kind="python", import_path="fractions:Fraction"), 0)
