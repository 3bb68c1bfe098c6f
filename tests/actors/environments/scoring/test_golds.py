"""Which of the data's own answers are refused before a run begins, in real scoring processes."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.environments.base import Problem
from actors.environments.scoring.golds import check_golds
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.rewards import EnvironmentReward, ExactReward, ScoringConfig
from tests.actors.environments.parrot import Parrot
from tests.patience import WAIT_S


class Sleepy(Parrot):
    """Hangs at the first sight of the answer "once", and each time at "always"."""

    def __init__(self, mark: str) -> None:
        super().__init__([])
        self._mark = Path(mark)

    def score(self, problem: Problem, response: str) -> float:
        if problem.answer == "always" or (problem.answer == "once" and not self._mark.exists()):
            self._mark.touch()
            time.sleep(WAIT_S)
        return 1.0


def problems(*answers: str) -> list[Problem]:
    return [Problem(f"file:{number}", "?", answer) for number, answer in enumerate(answers)]


def check(answers: Sequence[str], timeout_s: float, mark: Path) -> None:
    environment = EnvironmentConfig(kind="python", import_path=f"{__name__}:Sleepy", options={"mark": str(mark)})
    check_golds(problems(*answers), (EnvironmentReward(timeout_s=timeout_s),), ScoringConfig(processes=1), environment)


def test_an_answer_that_took_too_long_once_is_checked_again(tmp_path: Path) -> None:
    check(["at once", "once", "at once"], 5.0, tmp_path / "mark")  # of a busy machine: the others answer in time
    assert (tmp_path / "mark").exists()


def test_an_answer_that_always_takes_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.environment: 1 of 1 answers .*: file:0: no value within 0\.5 s\. Correct"):
        check(["always"], 0.5, tmp_path / "mark")


def test_answers_that_are_not_right_by_their_own_reward_are_named() -> None:
    reward = ExactReward(ignore="$", timeout_s=WAIT_S)
    with pytest.raises(ConfigError, match=r"rewards\.exact: 2 of 3 answers .*: file:1: .*; file:2: .* Correct"):
        check_golds(problems("12", "$", "$$"), (reward,), ScoringConfig(processes=1), EnvironmentConfig())
