"""Verdicts from several rewards at once: local ones, and judges that are well, down, slow or refuse for the rate."""

from collections.abc import Iterator
from typing import Any

import pytest

from actors.environments.actor import EnvironmentActor
from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import ScoringError, Verdict
from configs.environment import EnvironmentConfig
from configs.rewards import ExactReward, JudgeReward, PythonReward, ScoringConfig
from tests.actors.environments.judge_stub import JudgeStub, Reply
from tests.patience import WAIT_S

PROBLEM = Problem("p:1", "What?", "yes")
OBEY = "tests.actors.environments.scoring.hostile:obey"


def service(*rewards: Any, keys: dict[str, str] | None = None, **changes: Any) -> EnvironmentActor:
    config = ScoringConfig(**({"processes": 2, "batch_timeout_s": WAIT_S} | changes))
    return EnvironmentActor(EnvironmentConfig(), rewards, config, max_new_tokens=16, keys=keys or {})


def judge(url: str, **changes: Any) -> JudgeReward:
    return JudgeReward(**({"url": url, "model": "m", "api_key": "${env:JUDGE_KEY}", "timeout_s": WAIT_S, "retries": 1} | changes))


def score(of: EnvironmentActor, *texts: str) -> list[Verdict]:
    return of.score([PROBLEM] * len(texts), [Response(text, 3, False) for text in texts])


@pytest.fixture
def stub() -> Iterator[JudgeStub]:
    with JudgeStub(usual=Reply("5")) as stub:
        yield stub


def test_local_rewards_and_a_judge_make_one_verdict(stub: JudgeStub) -> None:
    with service(ExactReward(weight=0.5), judge(stub.url, weight=2.0), keys={"judge": "k3y"}) as scoring:
        right, wrong = score(scoring, "yes", "no")
        assert (right.reward, right.success, right.outcome) == (0.5 + 2.0 * 0.5, True, "scored")
        assert (wrong.reward, wrong.success) == (1.0, False)
        assert scoring.metrics()["judge/judge/requests"] == 2
        assert stub.keys == ["Bearer k3y"] * 2


@pytest.mark.parametrize(
    ("reply", "outcome", "word"),
    [
        (Reply(how="hang"), "timed_out", "answer"),
        (Reply.status(429, retry_after="3600"), "timed_out", "429"),
        (Reply.status(500), "failed", "500"),
        (Reply.status(401), "failed", "401"),
        (Reply("no number"), "failed", "grade"),
        (Reply(how="reset"), "failed", ""),
    ],
)
def test_a_judge_that_does_not_answer_leaves_the_other_rewards_alone(stub: JudgeStub, reply: Reply, outcome: str, word: str) -> None:
    stub.usual = reply
    unwell = judge(stub.url, timeout_s=1 if outcome == "timed_out" else WAIT_S)
    with service(ExactReward(), unwell, keys={"judge": "k3y"}, on_timed_out="drop_sample") as scoring:
        (verdict,) = score(scoring, "yes")
        assert (verdict.outcome, verdict.reward) == (outcome, 0.0)
        assert verdict.drop == ("sample" if outcome == "timed_out" else "no")
        assert verdict.parts["exact"].value == 1.0
        assert word in verdict.parts["judge"].error
        assert "k3y" not in verdict.error


def test_a_judge_that_is_down() -> None:
    with service(judge("http://127.0.0.1:9/v1"), keys={"judge": "k3y"}, on_failed="drop_group") as scoring:
        (verdict,) = score(scoring, "yes")
        assert (verdict.outcome, verdict.drop) == ("failed", "group")


def test_a_judge_has_the_batch_s_time_and_no_more(stub: JudgeStub) -> None:
    stub.usual = Reply(how="hang")
    with service(ExactReward(), judge(stub.url, timeout_s=600), keys={"judge": "k"}, batch_timeout_s=3) as scoring:
        verdicts = score(scoring, *["yes"] * 40)
        assert {verdict.parts["judge"].outcome for verdict in verdicts} == {"timed_out"}
        assert {verdict.parts["exact"].value for verdict in verdicts} == {1.0}


def test_too_many_responses_without_a_reward_end_the_run() -> None:
    obeying = PythonReward(import_path=OBEY, timeout_s=WAIT_S)
    with service(obeying, tolerance=0.25, tolerance_window=8) as scoring:
        score(scoring, "raise no", "raise no", *["value 1"] * 6)
        with pytest.raises(ScoringError, match=r"3 of the last 8 .*scoring\.tolerance = 0\.25.*python: ValueError: never"):
            score(scoring, "raise never", "value 1", "raise never", "raise never", *["value 1"] * 3)


def test_a_reward_without_an_opinion_adds_nothing() -> None:
    with service(PythonReward(import_path=OBEY), ExactReward(weight=0.25)) as scoring:
        (verdict,) = scoring.score([Problem("p", "q", "none")], [Response("none", 1, False)])
        assert (verdict.reward, verdict.success, verdict.outcome) == (0.25, True, "scored")  # exact has the first opinion
    with service(PythonReward(import_path=OBEY)) as scoring:
        (verdict,) = score(scoring, "none")
        assert (verdict.outcome, verdict.error) == ("failed", "python: no reward has an opinion")
