"""Waits end at their deadline, with the first failure, and with the name of the silent or dead actor."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray

from actors.waiting import ActorGoneError, ActorTimeoutError, find, wait, wait_all
from tests.patience import WAIT_S

NAMESPACE = "test-waiting"


class Sleeper:
    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise LookupError("no model in the cupboard")

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self) -> None:
        raise KeyError("input_ids")

    def die(self) -> None:
        os._exit(3)


@pytest.fixture
def sleepers(ray_session: None):
    remote = ray.remote(Sleeper)
    made = {name: remote.options(name=name, namespace=NAMESPACE, num_cpus=0).remote() for name in ("first", "second")}
    yield made
    for handle in made.values():
        ray.kill(handle)


class Stop(BaseException):
    """As Prefect's TerminationSignal."""


def test_what_a_signal_raises_comes_through(sleepers) -> None:
    def stop(*_: object) -> None:
        raise Stop

    wait(sleepers["first"].sleep.remote(0), who="first", what="start", timeout_s=WAIT_S)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        for _ in range(3):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Stop):
                wait(sleepers["first"].sleep.remote(1), who="first", what="train", timeout_s=WAIT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_values_come_by_name_in_the_order_asked(sleepers) -> None:
    refs = {"second": sleepers["second"].sleep.remote(0.2), "first": sleepers["first"].sleep.remote(0.0)}
    assert list(wait_all(refs, what="sleep", timeout_s=WAIT_S).items()) == [("second", 0.2), ("first", 0.0)]


def test_a_silent_actor_is_named_at_the_deadline(sleepers) -> None:
    wait(sleepers["first"].sleep.remote(0), who="first", what="start", timeout_s=WAIT_S)
    with pytest.raises(ActorTimeoutError, match="train: no answer from first within 1 s"):
        wait(sleepers["first"].sleep.remote(5), who="first", what="train", timeout_s=1)


def test_the_first_failure_ends_the_wait(sleepers) -> None:
    wait_all({name: handle.sleep.remote(0) for name, handle in sleepers.items()}, what="start", timeout_s=WAIT_S)
    started = time.monotonic()
    with pytest.raises(ActorGoneError, match="train: second died"):
        wait_all({"first": sleepers["first"].sleep.remote(60), "second": sleepers["second"].die.remote()}, what="train", timeout_s=WAIT_S)
    assert time.monotonic() - started < 60


def test_an_error_of_the_actors_own_code_comes_through_as_it_was(sleepers) -> None:
    with pytest.raises(KeyError, match="input_ids"):
        wait(sleepers["first"].fail.remote(), who="first", what="get", timeout_s=WAIT_S)


def test_a_constructor_that_raised_says_what(ray_session: None) -> None:
    broken = ray.remote(Sleeper).options(num_cpus=0).remote(broken=True)
    with pytest.raises(ActorGoneError, match=r"start: third died .*no model in the cupboard"):
        wait(broken.sleep.remote(0), who="third", what="start", timeout_s=WAIT_S)


def test_a_name_that_is_not_there(ray_session: None) -> None:
    with pytest.raises(ActorGoneError, match="'nobody' is not in Ray namespace 'test-waiting'"):
        find("nobody", NAMESPACE)
