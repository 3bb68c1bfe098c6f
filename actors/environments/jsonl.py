"""Prompts of the user's own: {"prompt": ..., "answer": ...} lines, checked by math-verify or as exact text."""

from __future__ import annotations

import json
import logging

import fsspec
from math_verify import parse, verify

from actors.environments.base import Environment, Problem, Split
from configs.base import ConfigError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it logs each response that is no mathematics


class JsonlEnvironment(Environment):
    """`path` is any fsspec URL. Without `validation_path` the last `validation_size` lines are held out."""

    def __init__(self, *, path: str, validation_path: str | None, validation_size: int) -> None:
        lines = _read(path)
        if validation_path:
            held_out = _read(validation_path)[:validation_size]
        elif len(lines) > validation_size:
            lines, held_out = lines[:-validation_size], lines[-validation_size:]
        else:
            raise ConfigError(
                f"environment.path: {path} has {len(lines)} lines, not more than environment.validation_size = {validation_size}: "
                "give environment.validation_path, or lower environment.validation_size"
            )
        self._problems: dict[Split, list[Problem]] = {
            "train": [Problem(uid=f"t{i}", question=q, answer=a) for i, (q, a) in enumerate(lines)],
            "validation": [Problem(uid=f"v{i}", question=q, answer=a) for i, (q, a) in enumerate(held_out)],
        }

    def size(self, split: Split) -> int:
        return len(self._problems[split])

    def problem(self, split: Split, index: int) -> Problem:
        if index < 0:
            raise IndexError(f"{split} problem {index}")
        return self._problems[split][index]

    def score(self, problem: Problem, response: str) -> float:
        if response.strip() == problem.answer.strip():
            return 1.0
        # Timeouts of math-verify use SIGALRM, which works in a main thread only; actors run elsewhere.
        gold = parse(problem.answer, parsing_timeout=None)
        given = parse(response, parsing_timeout=None)
        return float(bool(gold) and bool(given) and verify(gold, given, timeout_seconds=None))


def _read(path: str) -> list[tuple[str, str]]:
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"environment.path: cannot read {path}: {error}") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((str(row["prompt"]), str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(f'{path}, line {number}: expected {{"prompt": ..., "answer": ...}}') from None
    if not rows:
        raise ConfigError(f'{path}: the data set is empty; write one {{"prompt": ..., "answer": ...}} object per line')
    return rows
