"""The table of docs/rewards.md, row by row; and numbers that are equal to themselves and to nothing else."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.rewards.math import MathReward, final_answer, last_boxed, last_expression, split_unit, undelimited

DOC = Path(__file__).parents[3] / "docs" / "rewards.md"
_ROW = re.compile(r"^\| `(.+?)` \| (?:`(.*?)`)? ?\| ([01]) \|$", re.MULTILINE)
TABLE = [(gold.replace(r"\n#", "\n#"), response, float(reward)) for gold, response, reward in _ROW.findall(DOC.read_text())]
REWARD = MathReward()


def score(gold: str, response: str) -> float:
    return REWARD.score(Problem("p:1", "?", gold), Response(response, 1, False))


def test_the_table_is_a_table() -> None:
    assert len(TABLE) >= 180
    assert {reward for _, _, reward in TABLE} == {0.0, 1.0}


@pytest.mark.parametrize(("gold", "response", "reward"), TABLE)
def test_a_row_of_the_table(gold: str, response: str, reward: float) -> None:
    assert score(gold, response) == reward


@pytest.mark.parametrize("gold", sorted({gold for gold, _, _ in TABLE}))
def test_every_gold_is_right_by_its_own_reward_and_a_corrupted_one_is_not(gold: str) -> None:
    problem = Problem("p:1", "?", gold)
    REWARD.check(problem)
    assert score(gold, REWARD.reference(problem)) == 1
    corrupted = REWARD.corrupted(problem)
    assert corrupted is None or score(gold, corrupted) == 0
    assert corrupted is not None or not any(character.isdigit() for character in gold)


@settings(max_examples=30, deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_whole_numbers(number: int) -> None:
    for said in (
        rf"\boxed{{{number}}}",
        f"#### {number:,}",
        f"The answer is {number}.",
        f"It is ${number}$.",
        f"{number}",
        f"#### {number}.0",
    ):
        assert score(str(number), said) == 1, said
        assert score(str(number + 1), said) == 0, said


@settings(max_examples=30, deadline=None)
@given(st.integers(-999, 999), st.integers(2, 999))
def test_fractions(numerator: int, denominator: int) -> None:
    value = Fraction(numerator, denominator)
    said = rf"\boxed{{\frac{{{numerator}}}{{{denominator}}}}}"
    assert score(f"{value}", said) == 1
    assert score(f"{value + 1}", said) == 0
    assert score(f"{value + Fraction(1, 1000)}", said) == 0


@given(st.text(max_size=200))
def test_no_text_is_right_by_accident(text: str) -> None:
    assert score(r"123456789\sqrt{7}", text) == 0


@given(st.text(alphabet="{}\\boxed ab1", max_size=60))
def test_what_is_boxed_has_balanced_braces(text: str) -> None:
    found = last_boxed(text)
    if found is not None:
        bare = re.sub(r"\\.", "", found, flags=re.DOTALL)
        assert bare.count("{") == bare.count("}")
        assert f"{{{found}}}" in text


def test_where_a_response_has_its_answer() -> None:
    assert final_answer(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{cut off") == r"\frac{1}{2}"
    assert final_answer("#### 3\nno wait\n#### 1,234\n") == "1,234"
    assert final_answer("The answer is: $x = 2$. Or is it?") == "x = 2"
    assert final_answer("nothing to see") is None
    assert undelimited(r"$\boxed{\text{a}}$") == r"\text{a}"
    assert undelimited(r"\boxed{1}, \boxed{2}") == r"\boxed{1}, \boxed{2}"


def test_units_and_what_looks_like_one() -> None:
    assert split_unit(r"12\pi \text{ cm}^{2}") == (r"12\pi", "cm^2")
    assert split_unit("x = 5 square meters") == ("x = 5", "square m")
    assert split_unit("1000_{2}") == ("1000", "_2")
    for formula in ("2ab", "5 m", "3 sin x", r"2 \text{ or more}", "Paris", r"\text{Monday}"):
        assert split_unit(formula) == (formula, "")


def test_what_a_text_ends_with() -> None:
    assert last_expression("It is 3 + 4 = 7.") == "7"
    assert last_expression("It is 1 or 2") == "1 or 2"
    assert last_expression("$x$ and $y$ are $1$ or $2$") == "1 or 2"
    assert last_expression("no number") is None


@settings(max_examples=30, deadline=None)
@given(st.integers(-999, 999), st.integers(-999, 999))
def test_of_two_different_answers_neither_is_right(one: int, other: int) -> None:
    said = [
        f"It is {one} or {other}",
        rf"\boxed{{{one}}} or \boxed{{{other}}}",
        rf"\boxed{{{one} \text{{ or }} {other}}}",
        f"${one}$, ${other}$",
    ]
    for text in said if one != other else []:
        assert score(str(one), text) == score(str(other), text) == 0, text


@pytest.mark.parametrize("gold", ["", "  ", r"\boxed{}", r"\frac{", "{{{"])
def test_golds_that_cannot_be_read(gold: str) -> None:
    with pytest.raises(ValueError, match="answer"):
        REWARD.check(Problem("p:1", "?", gold))
