"""The replay buffer under every interleaving of its two sides, with each sampler, against a plain model of what may happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.data_plane.meta import KVBatchMeta
from actors.rollout.ledger import Ledger
from actors.rollout.ledger_types import Claim, GroupStateError
from actors.rollout.staleness import Refusal, build
from actors.rollout.transitions import Admitted
from configs.staleness import SAMPLERS, AsyncConfig

ROWS = 2
RARELY = st.sampled_from([1, 2, 3, 0])


class PlaneDownError(Exception):
    """The data plane did not answer."""


@dataclass
class Known:
    """What the model knows of a group that the buffer holds."""

    keys: tuple[str, ...]
    state: str
    admitted: int
    target: int | None
    start: int = -1
    claimed: int = -1
    committed: int = -1


def meta_of(keys: Sequence[str], uid: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=tuple(keys), sequence_lengths=(5,) * len(keys), tags=({"prompt_uid": uid},) * len(keys))


class Machine(RuleBasedStateMachine):
    """Writer, trainer and version bumps in any order; the data plane is a set of keys, and sometimes down."""

    sampler: str

    @initialize(age=st.integers(0, 3), step=st.integers(1, 3), spare=st.integers(0, 3), in_flight=st.integers(1, 12))
    def begin(self, age: int, step: int, spare: int, in_flight: int) -> None:
        self.age, self.step, self.capacity, self.in_flight = age, step, step * (age + 1) + spare, in_flight
        self.version = self.first = 2
        config = AsyncConfig(max_trajectory_age_steps=age, sampler=self.sampler, buffer_capacity=self.capacity)
        self.rows: set[str] = set()
        self.cleared: list[str] = []
        self.down = False
        self.now = 0.0
        self.buffer = Ledger(
            build(config, step),
            capacity=self.capacity,
            max_in_flight=in_flight,
            version=self.version,
            clear=self.clear,
            clock=lambda: self.now,
        )
        self.known: dict[str, Known] = {}
        self.commits = 0
        self.trained_now: Counter[int | None] = Counter()  # by stamp; claimed at this version and trained
        self.minted: list[str] = []
        self.count = 0
        self.ends = dict.fromkeys(("admitted", "trained", "failed", "dropped", "evicted"), 0)

    def clear(self, keys: Sequence[str]) -> None:
        if self.down:
            raise PlaneDownError
        self.cleared += keys
        self.rows -= set(keys)

    def having(self, *states: str) -> list[str]:
        return [uid for uid, group in self.known.items() if group.state in states]

    def end(self, uid: str, how: str) -> None:
        self.ends[how] += 1
        assert not self.rows & set(self.known.pop(uid).keys)

    def stored(self, uid: str) -> None:
        self.known[uid].state, self.known[uid].committed = "committed", self.commits
        self.commits += 1

    def some(self, data: st.DataObject, *states: str) -> list[str]:
        found = self.having(*states)
        return data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=len(found), unique=True))

    def attempt(self, action: Callable[[], object]) -> bool:
        """Whether the action went through; with the data plane down it may fail, and then changes nothing."""
        before = self.buffer.metrics()
        try:
            self.result = action()
        except PlaneDownError:
            assert self.buffer.metrics() == before
            self.down = False
            return False
        return True

    # ---- the writer ----

    @rule(times=st.integers(1, 8))
    def reserve_some(self, times: int) -> None:
        for _ in range(times):
            self.reserve()

    def room(self) -> bool:
        """Whether one more group may begin, by the table in `staleness`."""
        held = len(self.having("in_flight", "committed", "cancelled", "claimed"))
        if held >= self.capacity or len(self.having("in_flight", "cancelled")) >= self.in_flight:
            return False
        if self.sampler == "windowed":
            return True
        if self.sampler == "in_order":
            stamps = Counter(group.target for group in self.known.values() if group.state != "cancelled") + self.trained_now
            return any(stamps[version] < self.step for version in range(self.version, self.version + self.age + 1))
        claimed = sum(self.known[uid].claimed == self.version for uid in self.having("claimed"))
        return len(self.having("in_flight", "committed")) + claimed + self.trained_now.total() < self.step * (self.age + 1)

    def reserve(self) -> None:
        uid, room = f"{self.count}", self.room()
        given = self.buffer.reserve(uid, ROWS)
        assert isinstance(given, Admitted) == room
        if isinstance(given, Refusal):
            assert given.reason in self.buffer.waiting_for(1)
            return
        assert len(given.keys) == ROWS
        assert given.version == self.version
        self.count += 1
        self.ends["admitted"] += 1
        self.minted += given.keys
        self.known[uid] = Known(given.keys, "in_flight", self.version, given.target_version)
        if self.sampler == "in_order":
            assert given.target_version is not None
            assert self.version <= given.target_version <= self.version + self.age
            assert sum(g.target == given.target_version and g.state != "cancelled" for g in self.known.values()) <= self.step

    @precondition(lambda self: self.having("in_flight", "cancelled"))
    @rule(data=st.data(), late=st.integers(-1, 4))
    def commit(self, data: st.DataObject, late: int) -> None:
        for uid in self.some(data, "in_flight", "cancelled"):
            self.commit_one(uid, late)

    def commit_one(self, uid: str, late: int) -> None:
        group = self.known[uid]
        group.start = min(group.admitted + late, self.version + 1)
        self.rows |= set(group.keys)
        if not self.attempt(lambda: self.buffer.commit(uid, meta_of(group.keys, uid), group.start, max(group.start, self.version))):
            return
        fits = {
            "windowed": self.version - group.start <= self.age,
            "weight_fifo": self.version - group.start <= self.age,
            "ready_first": True,
            "in_order": group.target is not None and group.target - group.start <= self.age,
        }[self.sampler]
        assert self.result == (fits and group.state == "in_flight")
        if self.result:
            self.stored(uid)
        else:
            self.end(uid, "evicted")

    @precondition(lambda self: self.having("in_flight"))
    @rule(late=st.integers(-1, 2))
    def finish_all(self, late: int) -> None:
        for uid in self.having("in_flight"):
            self.commit_one(uid, late)

    @precondition(lambda self: self.having("in_flight", "cancelled"))
    @rule(data=st.data(), written=st.integers(0, ROWS))
    def fail(self, data: st.DataObject, written: int) -> None:
        (uid, *_) = self.some(data, "in_flight", "cancelled")
        self.rows |= set(self.known[uid].keys[:written])
        if self.attempt(lambda: self.buffer.fail(uid, "engine died")):
            self.end(uid, "failed" if self.known[uid].state == "in_flight" else "evicted")

    @rule(dice=RARELY)
    def lose_the_writer(self, dice: int) -> None:
        if dice == 0:
            self.abandon()

    def abandon(self) -> None:
        for uid in self.having("in_flight", "cancelled"):
            self.rows.add(self.known[uid].keys[0])
        if self.attempt(lambda: self.buffer.abandon("collector died")):
            assert list(self.result) == self.having("in_flight", "cancelled")
            for uid in self.result:
                self.end(uid, "failed" if self.known[uid].state == "in_flight" else "evicted")

    # ---- the trainer ----

    @precondition(lambda self: self.having("committed"))
    @rule(short=st.integers(0, 2))
    def claim(self, short: int) -> None:
        count = max(1, self.step - short)
        text = self.buffer.waiting_for(count)
        claim = self.buffer.claim(count)
        if claim is None:
            assert f"of {count} groups ready for weight version {self.version}" in text
            return
        self.taken(claim, count)

    def taken(self, claim: Claim, count: int) -> None:
        groups = [self.known[uid] for uid in claim.uids]
        assert len(groups) == count == len(set(claim.uids))
        assert all(group.state == "committed" for group in groups)
        assert set(claim.meta.keys) <= self.rows
        assert list(claim.meta.keys) == [key for group in groups for key in group.keys]
        assert claim.ages == tuple(max(0, self.version - group.start) for group in groups)
        if self.sampler == "ready_first":
            first = sorted([*claim.uids, *self.having("committed")], key=lambda uid: self.known[uid].committed)
            assert list(claim.uids) == list(dict.fromkeys(first))[:count]
        else:
            assert max(claim.ages) <= self.age
        if self.sampler == "weight_fifo":
            newest = max(group.start for group in groups)
            passed = [self.known[uid].admitted for uid in self.having("in_flight")]
            passed += [self.known[uid].start for uid in self.having("committed") if uid not in claim.uids]
            assert all(start >= newest for start in passed)
        for group in groups:
            assert group.target == (self.version if self.sampler == "in_order" else None)
            group.state, group.claimed = "claimed", self.version

    @precondition(lambda self: self.having("claimed"))
    @rule(data=st.data())
    def trained(self, data: st.DataObject) -> None:
        uids = self.some(data, "claimed")
        if self.attempt(lambda: self.buffer.trained(uids)):
            self.done(uids)
            with pytest.raises(GroupStateError):
                self.buffer.trained(uids)

    def done(self, uids: Sequence[str]) -> None:
        for uid in uids:
            if self.known[uid].claimed == self.version:
                self.trained_now[self.known[uid].target] += 1
            self.end(uid, "trained")

    @precondition(lambda self: self.having("claimed"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        uids = self.some(data, "claimed")
        if self.attempt(lambda: self.buffer.release(uids)):
            for uid in uids:
                self.known[uid].state = "committed"
            assert set(self.result) == {uid for uid in uids if self.too_late(uid)}
            for uid in self.result:
                self.end(uid, "evicted")

    def too_late(self, uid: str) -> bool:
        group = self.known[uid]
        if self.sampler == "in_order":
            return group.target is None or group.target < self.version
        return self.sampler != "ready_first" and self.version - group.start > self.age

    @precondition(lambda self: self.having("committed", "claimed"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        uids = self.some(data, "committed", "claimed")
        if self.attempt(lambda: self.buffer.drop(uids, "zero_variance")):
            for uid in uids:
                self.end(uid, "dropped")

    @rule(by=st.sampled_from([1, 1, 0, 2]))
    def bump(self, by: int) -> None:
        if not self.attempt(lambda: self.buffer.set_version(self.version + by)):
            return
        self.version += by
        if by:
            self.trained_now.clear()
        for uid in self.result:
            if self.known[uid].state == "committed":
                self.end(uid, "evicted")
            else:
                assert self.known[uid].state == "in_flight"
                self.known[uid].state = "cancelled"

    @rule(dice=RARELY)
    def lose_the_plane(self, dice: int) -> None:
        self.down = dice == 0

    @rule()
    def wait(self) -> None:
        self.now += 7.0

    # ---- always ----

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "buffer"):
            return
        metrics = self.buffer.metrics()
        held = {name: metrics[f"replay/occupancy/{name}"] for name in ("in_flight", "cancelled", "committed", "claimed")}
        assert held == {name: len(self.having(name)) for name in held}
        assert sum(held.values()) <= self.capacity
        assert metrics["replay/occupancy"] == sum(held.values()) / self.capacity
        found = dict.fromkeys(self.ends, 0.0)
        for name, value in metrics.items():
            if (what := name.split("/")[1]) in found:
                found[what] += value
        assert found == self.ends
        assert self.ends["admitted"] == len(self.known) + sum(self.ends.values()) - self.ends["admitted"]
        assert self.rows <= {key for group in self.known.values() for key in group.keys}
        gone = set(self.minted) - {key for group in self.known.values() for key in group.keys}
        assert sorted(self.cleared) == sorted(gone)
        assert list(self.buffer.cancelled()) == self.having("cancelled")

    def teardown(self) -> None:
        """From wherever it stands, a working writer and trainer get three full steps through; then nothing is left."""
        if not hasattr(self, "buffer"):
            return
        self.down = False
        self.abandon()
        if uids := self.having("claimed"):
            self.buffer.trained(uids)
            self.done(uids)
        for _ in range(3):
            self.bump(1)
            while self.having("cancelled"):
                self.abandon()
            for _ in range(self.capacity):
                self.reserve()
                for uid in self.having("in_flight"):
                    self.land(uid)
            claim = self.buffer.claim(self.step)
            assert claim is not None, self.buffer.waiting_for(self.step)
            self.taken(claim, self.step)
            self.buffer.trained(claim.uids)
            self.done(claim.uids)
        self.adds_up()
        self.buffer.clear()
        assert not self.rows
        assert sorted(self.cleared) == sorted(self.minted)

    def land(self, uid: str) -> None:
        group = self.known[uid]
        group.start = self.version
        self.rows |= set(group.keys)
        assert self.buffer.commit(uid, meta_of(group.keys, uid), self.version, self.version)
        self.stored(uid)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_interleaving_loses_a_group_trains_it_twice_or_leaves_rows(sampler: str) -> None:
    machine = type(f"Machine_{sampler}", (Machine,), {"sampler": sampler})
    case = machine.TestCase
    case.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    case().runTest()
