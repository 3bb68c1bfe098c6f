"""What evaluates a response runs no program of the response's, and every verifier of reasoning_gym still works."""

import functools
import inspect
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.rewards.guard import guarded
from actors.environments.rewards.reasoning_gym import UNREADABLE, ReasoningGymReward
from configs import rewards as configured

EVALUATING = ["string_insertion", "binary_matrix", "spiral_matrix", "n_queens"]
PARSING = ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"]  # sympy.parse_expr
NO_PROBLEMS = {"composite", "survo"}  # composite wants options; survo's generator does not work with numpy 2
SLOW_S = 0.3

WRITING = [
    "__import__('os').system('touch {x}')", "__import__('os').popen('touch {x}').read()", "__import__('subprocess').run(['touch', '{x}'])",
    "__import__('os').mkdir('{x}')", "__import__('pathlib').Path('{x}').touch()", "open('{x}', 'w')", "open('{x}', 'a').write('x')",
    "open(file='{x}', mode='xb')", "exec('import os; os.system(\"touch {x}\")')", "eval('__import__(\"os\").system(\"touch {x}\")')",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{x}'])",
    "(lambda: __import__('os').system('touch {x}'))()", "__builtins__['__import__']('os').system('touch {x}')",
    "__import__('os').open('{x}', 65)", "__import__('os').symlink('/', '{x}')", "__import__('os').fork() or open('{x}', 'w')",
    "__import__('threading').Thread(target=open, args=('{x}', 'w')).start()", "__import__('ctypes').CDLL(None).system(b'touch {x}')",
    "__import__('builtins').open('{x}', 'w')", "sympify('__import__(\"os\").system(\"touch {x}\")')",
    "getattr(__import__('os'), 'system')('touch {x}')",
]  # fmt: skip


@functools.cache
def entries(task: str) -> tuple[Any, ...]:
    dataset, config = DATASETS[task]
    # Without one it draws a seed, and now and then a problem whose answer its verifier cannot read: -1 of gsm_symbolic.
    made = dataset(config=config(seed=1))
    return made, made[0], made[1]


def problem_of(entry: dict[str, Any]) -> Problem:
    return Problem("t0", entry["question"], str(entry["answer"]), columns=entry)


@pytest.fixture(scope="module")
def reward() -> ReasoningGymReward:
    return ReasoningGymReward(configured.ReasoningGymReward())


@pytest.mark.parametrize("task", [*EVALUATING, *PARSING])
def test_code_in_a_response_writes_nothing_and_earns_nothing(reward: ReasoningGymReward, task: str, tmp_path: Path) -> None:
    problem = problem_of(entries(task)[1])
    for payload in WRITING:
        for text in (payload, f"[{payload}]", f"1 + {payload}"):
            value = no_reward(reward, problem, text.replace("{x}", str(tmp_path / "x")))
            assert value < 0.1, payload
    time.sleep(0.05)  # for threads
    assert list(tmp_path.iterdir()) == []
    assert reward.score(problem, Response(problem.answer, 1, False)) == 1.0


@pytest.mark.parametrize("task", [*EVALUATING, *PARSING])
def test_a_response_cannot_end_the_process_or_change_the_verifier(reward: ReasoningGymReward, task: str) -> None:
    problem = problem_of(entries(task)[1])
    for text in ("exit()", "quit(1)", "[exit()]", "__import__('sys').exit(0)", "__import__('os')._exit(1)", "__import__('os').abort()"):
        assert no_reward(reward, problem, text) < 0.1
    for text in (
        "[oracle_answer]", "oracle_answer", "[entry['answer']]", "[row.split() for row in valid_solutions[0].split(chr(10))]",
        "oracle_answer.split()", "entry['metadata'].clear()", "entry.clear()", "setattr(type(self), 'score_answer', lambda *a: 1.0)",
        "globals().clear()",
        "setattr(__import__('math'), 'isclose', lambda *a, **k: True)", "Integer.__class__.__setattr__(Integer, 'x', 1)",
    ):  # fmt: skip
        assert no_reward(reward, problem, text) < 0.1, text
    assert reward.score(problem, Response(problem.answer, 1, False)) == 1.0


def no_reward(reward: ReasoningGymReward, problem: Problem, text: str) -> float:
    try:
        value = reward.score(problem, Response(text, 1, False))
    except Exception:  # noqa: BLE001  (a failed reward; whatever is no Exception fails the test)
        return 0.0
    assert value is not None
    return value


def test_all_verifiers_that_evaluate_a_response_are_known_here() -> None:
    found = {task for task, (dataset, _) in DATASETS.items() if re.search(r"\b(eval|exec)\(|parse_expr\(", own_source(dataset))}
    assert found - {"propositional_logic"} == {*EVALUATING, *PARSING}  # that one has a parse_expr of its own, which evaluates nothing


def own_source(dataset: type) -> str:
    source = inspect.getsource(dataset.score_answer)  # type: ignore[attr-defined]
    return source.replace('eval(entry["answer"])', "")  # number_sorting: the problem's own answer


@pytest.mark.parametrize("task", sorted(DATASETS.keys() - NO_PROBLEMS))
def test_every_verifier_gives_its_own_answer_the_same_score_as_without_guard(task: str) -> None:
    began = time.perf_counter()
    made, *two = entries(task)
    if time.perf_counter() - began > SLOW_S and task not in (*EVALUATING, *PARSING):
        return  # knight_swap and others may take seconds to find a problem
    fresh = ReasoningGymReward(configured.ReasoningGymReward())
    for entry in two:
        problem = problem_of(entry)
        for text in (problem.answer, "", "nonsense", "[[1, 2], [3]]"):
            assert outcome(fresh.score, problem, Response(text, 1, False)) == outcome(made.score_answer, text.strip(), entry)
        right = fresh.reference(problem)
        assert right is None or fresh.score(problem, Response(right, 1, False)) == 1.0


def outcome(call: Callable[..., Any], *arguments: object) -> object:
    try:
        return float(call(*arguments))
    except UNREADABLE:
        return 0.0
    except Exception as error:  # noqa: BLE001  (some verifiers raise at nonsense)
        return type(error)


def test_lists_in_a_response_still_count_as_the_verifier_says(reward: ReasoningGymReward) -> None:
    entry = entries("binary_matrix")[1]
    rows = [[int(cell) for cell in row.split()] for row in entry["answer"].split("\n")]
    assert reward.score(problem_of(entry), Response(str(rows), 1, False)) == 0.1


def test_the_configuration_of_the_problem_s_data_set_counts() -> None:
    _, config = DATASETS["puzzle24"]
    for given, value in ((config(max_value=5), 0.01), (config(), 1.0), ("no configuration", 1.0), (None, 1.0)):
        problem = problem_of(entries("puzzle24")[1] | {"config": given})
        assert ReasoningGymReward(configured.ReasoningGymReward()).score(problem, Response("6 * 4 * (5 - 4)", 1, False)) == value


def test_problems_of_others_are_no_business_of_this_reward(reward: ReasoningGymReward) -> None:
    for columns in (
        {},
        {"metadata": None},
        {"metadata": {}},
        {"metadata": {"source_dataset": 3}},
        {"metadata": {"source_dataset": "no_such_task"}},
    ):
        problem = Problem("p", "q", "a", columns=columns)
        assert reward.score(problem, Response("a", 1, False)) is None
        assert reward.reference(problem) is None


def test_the_last_match_of_the_pattern_is_scored() -> None:
    entry = entries("chain_sum")[1]
    patterned = ReasoningGymReward(configured.ReasoningGymReward(answer_pattern=r"-?\d+"))
    values = [
        patterned.score(problem_of(entry), Response(text, 1, False))
        for text in (f"1, 2 and {entry['answer']}.", f"{entry['answer']}, or 1.{int(entry['answer']) + 1}", "no")
    ]
    assert values[0] == 1.0
    assert max(values[1:]) < 1.0


# ---- the guard itself ----


def doings(path: Path) -> Iterator[Any]:
    yield lambda: os.system("true")
    yield lambda: subprocess.run(["true"])
    yield lambda: path.write_text("x")
    yield lambda: (path / "x").mkdir()
    yield lambda: os.remove(path)
    yield lambda: os.rename(path, path)
    yield lambda: os.kill(os.getpid(), 0)
    yield lambda: socket.socket()
    yield lambda: os.open(path, os.O_RDWR)
    yield lambda: path.open("r+")


def test_the_guard_refuses_inside_and_only_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    for do in doings(path):
        with guarded(), pytest.raises(PermissionError, match="a verifier must not"):
            do()
    with guarded():
        with guarded():
            assert path.read_text() == "content"
        with pytest.raises(PermissionError):  # still inside the outer one
            path.write_text("x")
    path.write_text("changed")
    assert subprocess.run(["true"]).returncode == 0


def test_exit_becomes_an_ordinary_exception() -> None:
    for leave in (exit, quit, lambda: (_ for _ in ()).throw(SystemExit(3))):
        with pytest.raises(RuntimeError, match="called exit"), guarded():
            next(leave()) if leave not in (exit, quit) else leave()
    for error in (KeyboardInterrupt, ValueError, MemoryError):
        with pytest.raises(error), guarded():
            raise error


def test_imports_work_inside_a_guard() -> None:
    script = (
        "from actors.environments.rewards.guard import guarded\nwith guarded():\n import dataclasses, json.tool, wave, fractions, difflib"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
