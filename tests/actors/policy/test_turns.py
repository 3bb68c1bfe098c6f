"""Calls that come at once, in any order, begin in the order of their stages: or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import permutations

import pytest

from actors.policy.turns import Turn, Turns, WithdrawnError
from actors.waiting import ActorTimeoutError
from tests.patience import WAIT_S

LOGPROB, REFERENCE = Turn(7, "logprob"), Turn(7, "ref_logprob")
TRAIN = Turn(7, "train", ("logprob", "ref_logprob"))
REFIT = Turn(7, "refit", ("logprob", "ref_logprob", "train"))


class Group:
    """A thread per call, as an actor has them; notes which stages ran."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.turns, self.ran = Turns(timeout_s), list[str]()
        self._threads = ThreadPoolExecutor(8)

    def send(self, turn: Turn, work: Callable[[], object] = lambda: None) -> Future[None]:
        def call() -> None:
            with self.turns.take(turn):
                work()
                self.ran.append(turn.stage)

        return self._threads.submit(call)


def fail() -> None:
    raise OSError("out of reach")


@pytest.mark.parametrize("order", permutations((LOGPROB, REFERENCE, TRAIN, REFIT)), ids=lambda order: "-".join(t.stage for t in order))
def test_stages_begin_in_their_order_whatever_the_order_of_arrival(order: tuple[Turn, ...]) -> None:
    group = Group()
    for future in [group.send(turn, lambda: time.sleep(0.002)) for turn in order]:
        future.result(WAIT_S)
    assert set(group.ran[:2]) == {"logprob", "ref_logprob"}
    assert group.ran[2:] == ["train", "refit"]


def test_nothing_begins_after_a_stage_that_failed_until_it_is_repeated() -> None:
    group = Group()
    training = group.send(TRAIN)
    group.send(REFERENCE).result(WAIT_S)
    with pytest.raises(OSError, match="out of reach"):
        group.send(LOGPROB, fail).result(WAIT_S)
    time.sleep(0.05)
    assert not training.done()
    group.send(LOGPROB).result(WAIT_S)
    training.result(WAIT_S)
    assert group.ran == ["ref_logprob", "logprob", "train"]


def test_what_waits_is_withdrawn_and_what_comes_later_too() -> None:
    group = Group()
    waiting = group.send(TRAIN)
    group.send(LOGPROB).result(WAIT_S)
    group.turns.withdraw(7)
    for call in (waiting, group.send(REFIT), group.send(REFERENCE)):
        with pytest.raises(WithdrawnError, match="of step 7 was not begun"):
            call.result(WAIT_S)
    assert group.ran == ["logprob"]


def test_a_withdrawal_leaves_what_runs_alone() -> None:
    group, go_on = Group(), threading.Event()
    running = group.send(LOGPROB, go_on.wait)
    time.sleep(0.02)
    group.turns.withdraw(7)
    go_on.set()
    running.result(WAIT_S)
    assert group.ran == ["logprob"]


def test_each_step_has_its_own_stages() -> None:
    group = Group()
    group.send(LOGPROB).result(WAIT_S)
    later = group.send(Turn(8, "train", ("logprob",)))
    time.sleep(0.05)
    assert not later.done()
    group.send(Turn(8, "logprob")).result(WAIT_S)
    later.result(WAIT_S)


def test_a_wait_in_which_nothing_goes_on_ends() -> None:
    group = Group(timeout_s=0.2)
    group.send(REFERENCE).result(WAIT_S)
    with pytest.raises(ActorTimeoutError, match=r"train of step 7: logprob had not ended, and nothing went on for 0 s"):
        group.send(TRAIN).result(WAIT_S)


def test_a_wait_goes_on_as_long_as_something_goes_on() -> None:
    group = Group(timeout_s=4.0)  # more than a sleep may take on a busy machine, less than both
    waiting = group.send(TRAIN)
    for turn in (REFERENCE, LOGPROB):
        time.sleep(2.5)
        group.send(turn).result(WAIT_S)
    waiting.result(WAIT_S)
