"""Real scoring processes under responses that do their worst: each is answered in time, and nothing of them outlives the pool."""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.pool import PoolClosedError, ScoringPool
from actors.environments.scoring.zygote import Start
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from configs.rewards import ExactReward, PythonReward, ScoringConfig
from tests.patience import WAIT_S

OBEY = "tests.actors.environments.scoring.hostile:obey"
LIMIT_S = 1.0
PROBLEM = Problem("p:1", "What?", "yes")


def new_pool(*rewards: object, **changes: object) -> ScoringPool:
    config = ScoringConfig(**({"processes": 2, "memory_mib": 2048, "max_processes": 32} | changes))
    return ScoringPool(Start(tuple(sys.path), rewards or (obeying(),), EnvironmentConfig(), 16, config))


def obeying(**changes: object) -> PythonReward:
    return PythonReward(**({"import_path": OBEY, "name": "obey", "timeout_s": WAIT_S} | changes))


def call(text: str, reward: str = "obey") -> tuple[str, Problem, Response]:
    return reward, PROBLEM, Response(text, 3, False)


def hasty(text: str) -> tuple[str, Problem, Response]:
    """Of the module's pool: ended after `LIMIT_S`. For what never ends by itself; on a busy machine anything else may be as slow."""
    return call(text, "hasty")


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    os.environ["SCORING_TEST_SECRET"] = "s3cret-value"
    with new_pool(obeying(), obeying(name="hasty", timeout_s=LIMIT_S), environment_variables=("SCORING_TEST_GIVEN",)) as pool:
        yield pool
    del os.environ["SCORING_TEST_SECRET"]


TIMED_OUT = ["loop", "sleep 600", "ignore_signals"]
EITHER = ["fork_bomb", "grow", "thread_bomb", "big_file hostile.bin"]  # as quickly as the machine is at it
IN_VAIN = ["stop", "kill 9", "kill 11", "kill 6"]  # the first process of a PID namespace is deaf to signals from inside
FAILED = [
    "text 1.0", "list", "complex", "huge", "value nan", "value inf", "value -inf", "value x", "memory", "recursion", "exit 0",
    "exit 1", "quit", "hard_exit 0", "hard_exit 9", "segfault", "raise <script>", "raise \x1b[31m\ud800",
    "interrupt", "bad_exception", "close_descriptors", "write_descriptors garbage\n", 'write_descriptors {"call": 1, "value": 1}\n',
    "write_descriptors {}\n", "no_such_action",
]  # fmt: skip


@pytest.mark.parametrize("text", [*TIMED_OUT, *EITHER, *FAILED])
def test_a_hostile_response_has_no_reward_and_the_others_have_theirs(pool: ScoringPool, text: str, tmp_path: Path) -> None:
    said = text.replace("hostile.bin", str(tmp_path / "hostile.bin"))
    worst = call(said) if text in FAILED else hasty(said)
    before, *_, hostile, after = pool.score([call("value 1"), *(call("value 0.5") for _ in range(9)), worst, call("value 2")])
    assert hostile.outcome in ("timed_out" if text in TIMED_OUT else "failed", "timed_out" if text in EITHER else "")
    assert hostile.value is None
    assert hostile.error
    assert hostile.error.isprintable()
    assert hostile.error.encode()
    assert (before.value, after.value) == (1.0, 2.0), (before, after)


def test_a_fork_that_comes_back_from_a_call_has_no_say(pool: ScoringPool) -> None:
    assert [part.value for part in pool.score([call("come_back_twice"), call("value 3")])] == [1.0, 3.0]


@pytest.mark.parametrize(("text", "value"), [("none", None), ("true", 1.0), ("leave_a_thread", 1.0), ("spawn", 1.0)])
def test_noise_does_no_harm(pool: ScoringPool, text: str, value: float | None) -> None:
    assert [(part.outcome, part.value) for part in pool.score([call(text), call("value 3")])] == [("scored", value), ("scored", 3.0)]


def test_a_gigabyte_on_standard_output_goes_nowhere() -> None:
    with new_pool(obeying(timeout_s=300)) as pool:
        assert [part.value for part in pool.score([call("print"), call("value 3")])] == [1.0, 3.0]


def test_a_worker_that_floods_its_line_or_kills_its_keeper_is_replaced(pool: ScoringPool) -> None:
    for text in ("fill_descriptors", "kill_parent", "kill_all", *IN_VAIN):
        hostile, other = pool.score([hasty(text), call("value 1")])
        assert hostile.outcome in ("scored", "failed", "timed_out")
        assert other.value == 1.0


def test_the_environment_of_the_run_stays_outside(pool: ScoringPool) -> None:
    asked = ["secret SCORING_TEST_SECRET", "environ s3cret-value", "secret RAY_ADDRESS", "secret PREFECT_API_URL", "secret PATH"]
    assert [part.value for part in pool.score([call(text) for text in asked])] == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_processes_that_a_response_leaves_behind_end_with_it(pool: ScoringPool, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    (part,) = pool.score([call(f"leave_a_child {mark}")])
    assert part.value == 1.0
    assert [part.value for part in pool.score([call("value 1")] * 8)] == [1.0] * 8
    until(lambda: not held(mark), "the process that a response left behind has ended")


def test_shipped_verifiers_have_no_network_and_users_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with new_pool() as pool:
            assert pool.score([call(f"connect {port}")])[0].value == 1.0


def test_a_batch_ends_in_time_even_when_every_response_hangs() -> None:
    with new_pool(obeying(timeout_s=600), batch_timeout_s=1.5) as pool:
        parts = pool.score([call("loop")] * 6)
        assert {part.outcome for part in parts} == {"timed_out"}
        until(lambda: pool.score([call("value 1")])[0].value == 1.0, "new workers score")  # their start may take longer than a batch


def test_the_pool_s_end_is_told_to_those_who_wait_and_leaves_no_process() -> None:
    others = descendants()
    pool = new_pool()
    pool.score([call("value 1")])
    ours = set(descendants()) - set(others)
    assert len(ours) >= 3  # zygote, keepers, workers
    pool.close()
    until(lambda: not [pid for pid in ours if running(pid)], "all scoring processes have ended")
    with pytest.raises(PoolClosedError):
        pool.score([call("value 1")])
    pool.close()


@pytest.mark.parametrize(
    ("import_path", "message"),
    [("tests.actors.environments.scoring.nowhere:f", "nowhere"), ("os:system", "os:system"), ("tests.patience:WAIT_S", "WAIT_S")],
)
def test_a_reward_that_cannot_be_had_is_named_before_anything_is_scored(import_path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_pool(PythonReward(import_path=import_path, options={}))


def test_exact_match_needs_no_user_code() -> None:
    with new_pool(ExactReward()) as pool:
        parts = pool.score([("exact", PROBLEM, Response(text, 1, False)) for text in ("yes", " yes\n", "no", "")])
        assert [part.value for part in parts] == [1.0, 1.0, 0.0, 0.0]
        assert not pool.score([])


def descendants() -> list[int]:
    found, wanted = [], [os.getpid()]
    while wanted:
        pid = wanted.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            wanted += children
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.02)
