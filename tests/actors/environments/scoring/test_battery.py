"""Every verifier that ships, under responses that mean harm: all are answered, none is paid, and the healthy ones beside them are.

All go in one batch, a healthy response after each: a hostile one must not hurt its neighbours in the same process.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.pool import ScoringPool
from actors.environments.scoring.verdict import OUTCOMES, Part
from actors.environments.scoring.zygote import Start
from configs.environment import EnvironmentConfig
from configs.rewards import ExactReward, JsonSchemaReward, MathReward, PythonReward, ReasoningGymReward, RegexReward, ScoringConfig
from tests.actors.environments.scoring.test_pool import OBEY, descendants, running, until

LIMIT_S = 2.0
PARSING, EVALUATING = (
    ["countdown", "puzzle24", "polynomial_multiplication"],
    ["string_insertion", "binary_matrix", "spiral_matrix", "n_queens"],
)
PROCESSES = 4  # most of what is scored here waits for its deadline

FORM = {"type": "object", "properties": {"n": {"multipleOf": 0.5}, "e": {"pattern": "^(a+)+$"}}, "required": ["n"]}
REWARDS = (
    ExactReward(timeout_s=LIMIT_S, pattern=r"(?i)(?:a|aa)+$|yes", ignore_case=True),
    RegexReward(timeout_s=LIMIT_S, pattern=r"^(\w+\s?)*$"),  # careless, as the one above: exponential in the length of what nearly fits
    JsonSchemaReward(timeout_s=LIMIT_S, json_schema=FORM),
    MathReward(timeout_s=LIMIT_S),
    ReasoningGymReward(timeout_s=LIMIT_S),
    PythonReward(timeout_s=LIMIT_S, import_path=OBEY, name="python"),
)

MATH = [
    r"\boxed{9^{9^{9^{9}}}}", "$99999999!$", r"\boxed{\binom{10^{9}}{10^{8}}}", r"\boxed{10^{10^{10}}}",
    r"\boxed{" + r"\frac{1}{" * 40 + "2" + "}" * 40 + "}", r"\boxed{1} " * 500, r"\boxed{" + "{" * 10**5 + "2" + "}" * 10**5 + "}",
    r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^k}}", r"\boxed{\int_0^1 x^{x^{x^x}} \sin(e^{x^{x}}) dx}",
    r"\boxed{\prod_{k=1}^{10^{9}} k^{k}}",
    r"\boxed{\begin{pmatrix} 9^{9^{9^9}} & 9999999! \\ 7^{7^{7^7}} & 1 \end{pmatrix}}", r"\boxed{" + "{" * 5000, r"\boxed{" + "}" * 5000,
    r"\boxed{" + "9" * 10**6 + "}", r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 300 + "}", r"\boxed{0.000000001^{-999999999}}",
    r"\boxed{\lim_{x \to 0} \frac{\sin^{999}(x^{999})}{x^{999999}}}", r"\boxed{" + "(" * 1000 + "7" + ")" * 1000 + "}",
    r"\boxed{x^{" + "x^{" * 60 + "}" * 61 + "}", "answer is " * 10**5, "$" * 10**6, "x" * 10**7, "\\" * 10**6, r"\boxed" * 10**5,
]  # fmt: skip
ALGEBRA = ["(" * 5000 + "1" + ")" * 5000, "1" * 10**5, "exit()", "__import__('os')._exit(0)", "x" * 10**6, "open('/dev/zero').read()"]
EVALUATED = [
    "__import__('os').system('sleep 600')", "__import__('os').kill(__import__('os').getppid(), 9)", "exit()", "[0 for _ in iter(int, 1)]",
    "'a' * 10**12", "(lambda f: f(f))(lambda f: f(f))", "[" * 10**5, "[" * 150 + "]" * 150, "__import__('time').sleep(600)",
    "[oracle_answer]",
    "globals().clear()", "1 if" * 10**4,
]  # fmt: skip
HANGING = {"countdown": ["9**9**9**9", "factorial(99999999)"], "puzzle24": ["9**9**9**9"], "binary_matrix": ["9**9**9**9"]}
DOCUMENTS = [
    "[" * 10**6, '{"n": ' * 10**5, '{"n": ' + "9" * 10**6 + "}", '{"n": 1e999}', '{"n": NaN}', '{"n": 1, "e": "' + "a" * 40 + 'b"}',
    "```json\n" * 10**5,
]  # fmt: skip
CARELESS = ["a" * 40 + "!", "word " * 30 + "?"]
TEXT = [
    "", "\x00", "\ud800", "\u202eja", "🏴‍☠️" * 1000, "x" * 2**20, "\n" * 10**5, "\u2028ja\ufeff", "NaN", "1e999", "ja\x00", "﷽" * 10**4,
    "%s%n{0}${env:PATH}",
]  # fmt: skip
WORDS = ("", "x" * 2**20, "\n" * 10**5, "NaN", "1e999", "﷽" * 10**4)  # for which the careless pattern is quick, and right or slow
OBEYED = ["loop", "hard_exit 1", "exit 0", "value nan", "none", "segfault", "recursion", "memory", "list"]


@dataclass(frozen=True)
class Shot:
    """A call and, when it is a healthy one, what it must come to."""

    label: str
    problem: Problem
    text: str
    value: float | None = None

    @property
    def call(self) -> tuple[str, Problem, Response]:
        return self.label, self.problem, Response(self.text, 1, False)


WORD, NUMBER = Problem("word", "What?", "yes"), Problem("number", "How many?", "7")


@functools.cache
def gym(task: str) -> Problem:
    entry: dict[str, Any] = DATASETS[task][0](config=DATASETS[task][1](seed=1))[0]
    return Problem(task, entry["question"], str(entry["answer"]), columns=entry)


def hostile() -> list[Shot]:
    shots = [Shot(label, WORD, text) for label in ("exact", "json_schema", "math") for text in TEXT]
    shots += [Shot("regex", WORD, text) for text in [*TEXT, *CARELESS] if text not in WORDS] + [Shot("exact", WORD, "a" * 60 + "!")]
    shots += [Shot("json_schema", WORD, text) for text in DOCUMENTS]
    shots += [Shot("math", NUMBER, text) for text in MATH]
    for tasks, texts in ((PARSING, ALGEBRA), (EVALUATING, EVALUATED), (["chain_sum"], TEXT)):
        shots += [Shot("reasoning_gym", gym(task), text) for task in tasks for text in [*texts, *HANGING.get(task, [])]]
    return shots + [Shot("python", WORD, text) for text in OBEYED]


def healthy() -> list[Shot]:
    return [
        Shot("exact", WORD, "it is YES", 1.0), Shot("exact", WORD, "no", 0.0), Shot("regex", WORD, "plain words", 1.0),
        Shot("json_schema", WORD, '{"n": 1.5}', 1.0), Shot("json_schema", WORD, '{"n": 1.7}', 0.0),
        Shot("math", NUMBER, r"So \boxed{\frac{14}{2}}", 1.0), Shot("math", NUMBER, r"\boxed{8}", 0.0), Shot("python", WORD,
        "value 0.25", 0.25),
        *(Shot("reasoning_gym", gym(task), gym(task).answer, 1.0) for task in ("countdown", "string_insertion", "n_queens", "chain_sum")),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    others = set(descendants())
    config = ScoringConfig(processes=PROCESSES, memory_mib=2048, max_processes=32)
    with ScoringPool(Start(tuple(sys.path), REWARDS, EnvironmentConfig(), 16, config)) as pool:
        yield pool
        ours = set(descendants()) - others
    until(lambda: not [pid for pid in ours if running(pid)], "all scoring processes have ended")


@pytest.fixture(scope="module")
def answers(pool: ScoringPool) -> list[tuple[Shot, Part]]:
    well = healthy()
    shots = [shot for number, bad in enumerate(hostile()) for shot in (bad, well[number % len(well)])]
    return list(zip(shots, pool.score([shot.call for shot in shots]), strict=True))


def test_the_battery_is_large_enough() -> None:
    assert len({(shot.label, shot.text) for shot in hostile()}) >= 60
    assert {shot.label for shot in hostile()} == {shot.label for shot in healthy()} == {reward.label for reward in REWARDS}


def test_every_hostile_response_is_answered_and_none_is_paid(answers: list[tuple[Shot, Part]]) -> None:
    for shot, part in answers:
        if shot.value is not None:
            continue
        said = f"{shot.label} {shot.problem.uid} {shot.text[:60]!r}: {part}"
        assert part.outcome in OUTCOMES, said
        assert part.value is None or part.value < 1.0, said
        assert part.error.isprintable(), said
        assert bool(part.error) == (part.outcome != "scored"), said
        if part.outcome == "timed_out":
            assert part.seconds >= LIMIT_S, said


def test_every_healthy_response_beside_them_has_its_value(pool: ScoringPool, answers: list[tuple[Shot, Part]]) -> None:
    for shot, first in answers:
        if shot.value is not None:
            part = first
            while part.outcome == "timed_out":  # a busy machine: pytest's own time limit ends this
                (part,) = pool.score([shot.call])
            assert (part.outcome, part.value) == ("scored", shot.value), f"{shot}: {part}"


def test_hanging_responses_are_timed_out(answers: list[tuple[Shot, Part]]) -> None:
    late = [(shot.label, shot.text) for shot, part in answers if part.outcome == "timed_out"]
    assert {"exact", "regex", "json_schema", "math", "reasoning_gym", "python"} == {label for label, _ in late}
    assert ("python", "loop") in late


def test_the_pool_is_whole_afterwards(pool: ScoringPool, answers: list[tuple[Shot, Part]]) -> None:
    assert answers
    well = [Shot("exact", WORD, text, value) for text, value in (("yes", 1.0), ("no", 0.0))] * 100
    assert [part.value for part in pool.score([shot.call for shot in well])] == [shot.value for shot in well]
    assert len(pool._workers) == pool.processes == PROCESSES
