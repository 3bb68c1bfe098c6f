"""Old and new model side by side, as markdown for a person: why, numbers, lineage, and answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tasks.reporting.text import number, score
from tasks.retraining.prompts import NewPrompts
from tasks.retraining.registry import Attempt

_LONGEST_CELL = 400
Answer = dict[str, Any]  # a line of answers-*.jsonl


def comparison_markdown(
    heading: str, attempt: Attempt, new: NewPrompts, old_answers: Sequence[Answer], new_answers: Sequence[Answer], shown: int
) -> str:
    """The page. Answers are of the same problems in the same order; those whose reward changed come first."""
    pairs = list(zip(old_answers, new_answers, strict=True))
    differences = [after - before for before, after in zip(_per_problem(old_answers), _per_problem(new_answers), strict=True)]
    parent = "the training recipe's own model" if attempt.parent is None else f"model {attempt.parent}"
    left_out = f" (left out: {new.repeated:,} repeated, {new.held_out:,} of the frozen set)" if new.repeated or new.held_out else ""
    lines = [
        f"## {heading}",
        "",
        f"{attempt.reason}.",
        "",
        f"Trained from {parent} on {attempt.prompts:,} new prompts of {len(new.files)} file(s){left_out}.",
        "",
        *_scores(attempt, differences),
        "",
        "### Answers",
        "",
        *_answers(pairs, shown),
        "",
        f"Data `{attempt.data_hash[:12]}`, configuration `{attempt.config_hash[:12]}`, frozen set `{attempt.frozen_hash[:12]}`.",
    ]
    return "\n".join(lines) + "\n"


def _per_problem(answers: Sequence[Answer]) -> list[float]:
    # Answers to one problem are not independent: their mean is one observation.
    rewards: dict[str, list[float]] = {}
    for answer in answers:
        rewards.setdefault(answer["uid"], []).append(answer["reward"])
    return [sum(of_one) / len(of_one) for of_one in rewards.values()]


def _scores(attempt: Attempt, differences: Sequence[float]) -> list[str]:
    count = len(differences)
    better, worse = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.nan
    rows = [("accuracy", attempt.old.accuracy, attempt.new.accuracy), ("reward", attempt.old.reward, attempt.new.reward)]
    return [
        "| frozen set | old | new | difference |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {score(old)} | {score(new)} | {new - old:+.3f} |" for name, old, new in rows),
        "",
        f"Of {count:,} problems {better:,} were answered better, {worse:,} worse, {count - better - worse:,} the same; "
        f"the standard error of the reward's difference is {number(error)}.",
    ]


def _answers(pairs: Sequence[tuple[Answer, Answer]], shown: int) -> list[str]:
    chosen = sorted(pairs, key=lambda both: both[0]["reward"] == both[1]["reward"])[:shown]  # stable: the order of the set otherwise
    return [
        "| prompt | expected | old | new |",
        "|---|---|---|---|",
        *(
            f"| {_cell(old['prompt'])} | {_cell(old['answer'])} | {_cell(old['response'])} ({score(old['reward'])}) "
            f"| {_cell(new['response'])} ({score(new['reward'])}) |"
            for old, new in chosen
        ),
    ]


def _cell(text: str) -> str:
    # One line, and nothing that ends the cell or is taken for markup.
    short = text if len(text) <= _LONGEST_CELL else text[:_LONGEST_CELL] + " …"
    for mark in "\\`*_[]<>|":
        short = short.replace(mark, f"\\{mark}")
    return short.replace("\r", " ").replace("\n", "<br>") or "(empty)"
