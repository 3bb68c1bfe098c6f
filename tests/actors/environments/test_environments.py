"""Problems are reproducible, held-out ones stay held out, and bad sources are refused by name."""

import subprocess
import sys

import pytest

from actors.environments import build
from actors.environments.registry import imported_here
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from tests.conftest import ROOT
from tests.patience import WAIT_S

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


def test_problems_need_no_plots_and_plots_are_there_afterwards() -> None:
    code = (
        "import sys, actors.environments.reasoning_gym\n"
        "assert not [name for name in sys.modules if name.startswith(('matplotlib', 'mpl_toolkits'))]\n"
        "import reasoning_gym\n"
        "assert reasoning_gym.create_dataset('game_of_life', size=1, seed=0)[0]['answer']\n"
        "import mpl_toolkits, matplotlib\n"
        "assert matplotlib.rcParams and mpl_toolkits.__path__\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)


def test_unknown_task_and_options() -> None:
    with pytest.raises(ConfigError, match="chain_sum"):
        build(gym(task="chain_sums"), 0)
    with pytest.raises(ConfigError, match="task_options"):
        build(gym(task_options={"min_turms": 2}), 0)


def test_a_class_of_the_users_own() -> None:
    config = EnvironmentConfig(kind="python", import_path="tests.actors.environments.parrot:Parrot", options={"words": ["ab", "cd"]})
    assert imported_here(config).score(build(config, 0).problem("train", 1), "cd") == 1
    with pytest.raises(ConfigError, match="cannot import"):
        build(EnvironmentConfig(kind="python", import_path="tests.actors.environments.parrot:Polly"), 0)
    with pytest.raises(ConfigError, match="does not derive"):
        build(EnvironmentConfig(kind="python", import_path="fractions:Fraction"), 0)
    with pytest.raises(ConfigError, match=r"environment\.options: .*Parrot.*'words'"):
        build(EnvironmentConfig(kind="python", import_path="tests.actors.environments.parrot:Parrot", options={"wurds": []}), 0)


def test_what_is_no_environment_is_not_called(tmp_path) -> None:
    mark = tmp_path / "called"
    with pytest.raises(ConfigError, match="does not derive"):
        build(EnvironmentConfig(kind="python", import_path="os:system", options={"command": f"touch {mark}"}), 0)
    assert not mark.exists()


def test_options_may_refer_to_secrets(monkeypatch) -> None:
    monkeypatch.setenv("PARROT_WORD", "psst")
    config = EnvironmentConfig(
        kind="python", import_path="tests.actors.environments.parrot:Parrot", options={"words": ["${env:PARROT_WORD}", "b"]}
    )
    assert build(config, 0).problem("train", 0).answer == "psst"
    assert "psst" not in config.model_dump_json()
