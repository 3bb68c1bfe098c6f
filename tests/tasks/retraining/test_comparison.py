"""The page that a person reads before and after a decision."""

from __future__ import annotations

import json

import pytest

from configs.environment import FieldsConfig
from tasks.retraining.comparison import comparison_markdown
from tasks.retraining.decision import Scores
from tasks.retraining.prompts import find_new, parse
from tests.tasks.retraining.test_registry import attempt

FIELDS = FieldsConfig()
MONDAY = b"".join(json.dumps({"prompt": prompt, "answer": "a"}).encode() + b"\n" for prompt in "ppq")


def answer(prompt: str, response: str, reward: float) -> dict[str, object]:
    return {"prompt": prompt, "response": response, "answer": "7", "reward": reward, "uid": prompt}


def page() -> str:
    scores = {"old": Scores(accuracy=1 / 3, reward=1 / 3), "new": Scores(accuracy=2 / 3, reward=2 / 3)}
    old = [answer("same", "7", 1.0), answer("3 + 4?", "no | idea", 0.0), answer("a\nb", "<b>8</b>", 0.0)]
    new = [answer("same", "7", 1.0), answer("3 + 4?", "7", 1.0), answer("a\nb", "", 0.0)]
    found = find_new({"monday.jsonl": MONDAY}, {}, {row.digest for row in parse("frozen", MONDAY.splitlines()[2], FIELDS)}, FIELDS)
    night = attempt(4).model_copy(update=scores)
    return comparison_markdown("Promoted", night, found, old, new, 2)


def test_verdict_numbers_and_lineage() -> None:
    text = page()
    assert text.startswith("## Promoted\n\nbecause.\n")
    assert "| accuracy | 0.333 | 0.667 | +0.333 |" in text
    assert "Of 3 problems 1 were answered better, 0 worse, 2 the same; the standard error of the reward's difference is 0.3333." in text
    assert "Trained from model 4 on 3 new prompts of 1 file(s) (left out: 1 repeated, 1 of the frozen set)." in text


def test_answers_that_changed_come_first_and_no_text_breaks_the_table() -> None:
    rows = page().split("### Answers")[1].split("\n\n")[1].splitlines()[2:]
    assert rows == ["| 3 + 4? | 7 | no \\| idea (0.000) | 7 (1.000) |", "| same | 7 | 7 (1.000) | 7 (1.000) |"]


def test_several_answers_to_a_problem_are_one_observation() -> None:
    old = [answer(prompt, "", reward) for prompt in "ab" for reward in (0.0, 1.0)]
    new = [answer(prompt, "", reward) for prompt, reward in (("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0))]
    night = attempt(4).model_copy(update=dict.fromkeys(["old", "new"], Scores(accuracy=0.5, reward=0.5)))
    text = comparison_markdown("Promoted", night, find_new({"monday.jsonl": MONDAY}, {}, set(), FIELDS), old, new, 2)
    assert "Of 2 problems 1 were answered better, 0 worse, 1 the same; the standard error of the reward's difference is 0.2500." in text


def test_one_problem_has_no_standard_error_and_pairs_must_match() -> None:
    night = attempt(4).model_copy(update=dict.fromkeys(["old", "new"], Scores(accuracy=0.5, reward=0.5)))
    found = find_new({"monday.jsonl": MONDAY}, {}, set(), FIELDS)
    one, two = [answer("a", "", 0.0)], [answer("a", "", 0.0), answer("b", "", 1.0)]
    assert "the standard error of the reward's difference is –." in comparison_markdown("Kept", night, found, one, one, 2)
    with pytest.raises(ValueError):
        comparison_markdown("Kept", night, found, one, two, 2)
