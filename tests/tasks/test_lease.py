"""One holder at a time: fast triggers, killed holders, paused holders."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.storage import Folder
from tasks.lease import BusyError, Lease, LeaseLostError
from tests.leases import acquired
from tests.stores import memory, url

__all__ = ["url"]


def test_the_second_is_told_who_is_at_work(url: str) -> None:
    first, second = (
        Lease(Folder(url, "registry.url"), name, 60) for name in ("flow run 'a' is retraining into", "flow run 'b' is retraining into")
    )
    with first.held():
        with pytest.raises(BusyError, match="flow run 'a' is retraining into"):
            second.acquire()
        first.check()
    with pytest.raises(LeaseLostError):
        first.check()
    second.acquire()  # at once: the first has released it
    second.check()


def test_a_killed_holder_blocks_for_the_lease_only(url: str) -> None:
    now = [1000.0]
    folder = Folder(url, "registry.url")
    killed, later = Lease(folder, "killed", 120, lambda: now[0]), Lease(folder, "later", 120, lambda: now[0])
    killed.acquire()
    now[0] += 119
    with pytest.raises(BusyError):
        later.acquire()
    now[0] += 2
    later.acquire()
    # It was not killed after all, only paused: now it must not write.
    with pytest.raises(LeaseLostError, match="another run has taken over"):
        killed.check()
    with pytest.raises(LeaseLostError):
        killed.renew()
    killed.release()
    later.check()
    assert len(folder.names()) == 1  # old numbers are tidied away


def test_a_holder_that_could_not_renew_stops_by_itself(url: str) -> None:
    now = [0.0]
    lease = Lease(Folder(url, "registry.url"), "a", 10, lambda: now[0])
    lease.acquire()
    now[0] = 11
    with pytest.raises(LeaseLostError, match="could not be renewed in time"):
        lease.check()


def test_it_is_renewed_while_it_is_held(url: str) -> None:
    folder = Folder(url, "registry.url")
    lease = Lease(folder, "a", 2)
    with lease.held():
        seen, deadline = set(), time.monotonic() + 60
        while len(seen) < 3:  # as first written, and two renewals
            seen.add(folder.read("000001.json"))
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lease.check()
        with pytest.raises(BusyError):
            Lease(folder, "b", 2).acquire()
    assert not [thread for thread in threading.enumerate() if thread.name == "lease"]


def test_of_triggers_at_the_same_moment_one_wins(tmp_path) -> None:
    folder = Folder(str(tmp_path), "registry.url")
    for round_ in range(4):
        leases = [Lease(folder, str(number), 60) for number in range(6)]
        won = acquired(leases)
        assert won.count(True) == 1, round_
        leases[won.index(True)].check()
        leases[won.index(True)].release()


class Holders(RuleBasedStateMachine):
    """Three runs on one folder; any of them may be killed or paused at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.barred_until = 1000.0, 0.0
        self.folder = Folder(memory(), "registry.url")
        self.leases = [self.lease(number) for number in range(3)]

    def lease(self, number: int) -> Lease:
        return Lease(self.folder, str(number), 10, lambda: self.now)

    def holding(self) -> list[int]:
        found = []
        for number, lease in enumerate(self.leases):
            try:
                lease.check()
            except LeaseLostError:
                continue
            found.append(number)
        return found

    @rule(number=st.integers(0, 2))
    def acquire(self, number: int) -> None:
        before = self.holding()
        if number in before:
            return
        try:
            self.leases[number].acquire()
        except BusyError:
            assert before or self.now < self.barred_until
        else:
            assert not before
            assert self.holding() == [number]

    @rule(number=st.integers(0, 2))
    def kill(self, number: int) -> None:
        if number in self.holding():
            self.barred_until = self.now + 10  # at most
        self.leases[number] = self.lease(number)

    @rule(number=st.integers(0, 2))
    def renew(self, number: int) -> None:
        before = self.holding()
        try:
            self.leases[number].renew()
        except LeaseLostError:
            assert number not in before
        else:
            assert set(before) <= {number}

    @rule(number=st.integers(0, 2))
    def release(self, number: int) -> None:
        before = self.holding()
        self.leases[number].release()
        assert self.holding() == [one for one in before if one != number]

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def at_most_one_holds_it(self) -> None:
        assert len(self.holding()) <= 1


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_second_try_of_the_same_run_need_not_wait() -> None:
    folder = Folder(memory(), "checkpoint.url")
    first = Lease(folder, "flow run 1 trains into", 60)
    first.acquire()
    with pytest.raises(BusyError, match="flow run 1 trains into memory://"):
        Lease(folder, "flow run 1 trains into", 60).acquire()
    with pytest.raises(BusyError):
        Lease(folder, "flow run 2 trains into", 60, again=True).acquire()
    again = Lease(folder, "flow run 1 trains into", 60, again=True)
    again.acquire()
    again.check()
    with pytest.raises(LeaseLostError):
        first.check()
