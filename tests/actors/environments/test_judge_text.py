"""What a judge is asked, and which grade its reply is: pure."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.rewards.judge import fill, grade_of
from configs.rewards import JudgeReward

PROBLEM = Problem("p0", "What is 6 x 7?", "42")
NUMBER = re.compile(JudgeReward.model_fields["pattern"].default)


def answer(text: str) -> Response:
    return Response(text, 1, False)


def test_a_prompt_is_filled_in_one_pass_and_keeps_other_braces() -> None:
    template = '{{question}} {question} {answer!r} {} {0} {other} }{ {answer} {"grade": 1} {response}'
    problem = Problem("p", "Q {answer} {response}", "A {question}")
    filled = fill(template, problem, answer(r"R {answer} \1 {question} \g<0>"))
    q, a, r = "Q {answer} {response}", "A {question}", r"R {answer} \1 {question} \g<0>"
    assert filled == f'{{{q}}} {q} {{answer!r}} {{}} {{0}} {{other}} }}{{ {a} {{"grade": 1}} {r}'


def test_the_end_of_a_long_response_is_kept_and_what_cannot_be_sent_is_replaced() -> None:
    assert fill("{response}", PROBLEM, answer("x" * 200_000 + "42")) == "x" * 99_998 + "42"
    assert fill("{response}", PROBLEM, answer("a\ud800b\x00é")) == "a?b\x00é"


@given(st.text(), st.text(), st.text(), st.text())
def test_any_text_makes_a_prompt(template: str, question: str, gold: str, response: str) -> None:
    fill(template + "{response}", Problem("p", question, gold), answer(response)).encode()


@pytest.mark.parametrize(
    ("reply", "pattern", "scale", "grade"),
    [
        ("10", NUMBER, 10, 1.0),
        ("The first part is worth 3, in all I say 0.", NUMBER, 10, 0.0),
        ("9" * 50 + " " * 20_000 + "4", NUMBER, 10, 0.4),
        ("Grade: 3 of 5, final", re.compile(r"Grade: (\d)"), 5, 0.6),
        ("1e0", re.compile(r"\S+"), 1, 1.0),
    ],
)
def test_grades(reply: str, pattern: re.Pattern[str], scale: float, grade: float) -> None:
    assert grade_of(reply, pattern, scale) == grade


@pytest.mark.parametrize(
    ("reply", "pattern"),
    [
        ("", NUMBER),
        ("It is right.", NUMBER),
        ("11", NUMBER),
        ("-1", NUMBER),
        ("9" * 400, NUMBER),
        ("nan", re.compile(r"\w+")),
        ("inf", re.compile(r"\w+")),
        ("good", re.compile(r"\w+")),
        ("x", re.compile(r"x(\d)?")),
    ],
)
def test_replies_without_a_grade(reply: str, pattern: re.Pattern[str]) -> None:
    with pytest.raises(ValueError, match="in the reply"):
        grade_of(reply, pattern, 10)
