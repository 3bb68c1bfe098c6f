"""The replay buffer by example: what it counts, explains and refuses. Its interleavings are in test_ledger_interleavings.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.meta import KVBatchMeta
from actors.rollout.ledger import GUARD, Ledger
from actors.rollout.ledger_types import GroupStateError, SamplerError
from actors.rollout.staleness import Admission, BufferState, Group, Refusal, build
from actors.rollout.transitions import Admitted, Announced, Ended
from configs.staleness import SAMPLERS, AsyncConfig

ROWS = 2


def meta_of(keys: Sequence[str], uid: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=tuple(keys), sequence_lengths=(5,) * len(keys), tags=({"prompt_uid": uid},) * len(keys))


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(sampler: str = "windowed", *, age: int = 1, step: int = 2, capacity: int | None = None, clock: Clock | None = None) -> Ledger:
    config = AsyncConfig(max_trajectory_age_steps=age, sampler=sampler, buffer_capacity=capacity)
    held = config.capacity(step)
    return Ledger(build(config, step), capacity=held, max_in_flight=held, version=0, clear=lambda keys: None, clock=clock or Clock())


def land(buffer: Ledger, uid: str, start: int | None = None, end: int | None = None) -> None:
    """Reserve and commit one group."""
    slot = buffer.reserve(uid, ROWS)
    assert isinstance(slot, Admitted)
    start = slot.version if start is None else start
    assert buffer.commit(uid, meta_of(slot.keys, uid), start, start if end is None else end)


def test_dynamic_sampling_fills_the_step_again() -> None:
    for sampler in SAMPLERS:
        buffer = make(sampler, age=0, step=3)
        for uid in "abc":
            land(buffer, uid)
        assert isinstance(buffer.reserve("early", ROWS), Refusal)
        first = buffer.claim(3)
        assert first is not None
        buffer.drop(first.uids[:2], "zero_variance")
        assert buffer.claim(2) is None
        for uid in "de":
            land(buffer, uid)
        second = buffer.claim(2)
        assert second is not None
        assert second.ages == (0, 0)
        assert isinstance(buffer.reserve("early", ROWS), Refusal)  # the step is full again
        buffer.trained([first.uids[2], *second.uids])
        metrics = buffer.metrics()
        assert (metrics["replay/trained"], metrics["replay/dropped/zero_variance"], metrics["replay/admitted"]) == (3, 2, 5)


def test_no_group_is_admitted_in_place_of_one_that_a_guard_has_dropped() -> None:
    """Its step is over; a synchronous run would draw prompts for nobody."""
    for sampler in ("ready_first", "weight_fifo", "in_order"):
        buffer = make(sampler, age=0, step=2)
        for uid in "ab":
            land(buffer, uid)
        claim = buffer.claim(2)
        assert claim is not None
        buffer.trained(claim.uids[:1])
        buffer.drop(claim.uids[1:], f"{GUARD}kl")
        assert isinstance(buffer.reserve("early", ROWS), Refusal)
        buffer.set_version(1)
        assert isinstance(buffer.reserve("next", ROWS), Admitted)
        assert buffer.metrics()["replay/dropped/guard/kl"] == 1


@given(sampler=st.sampled_from(["weight_fifo", "in_order"]), age=st.integers(0, 3), step=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_order_keeps_slow_groups_young_enough_to_be_trained(sampler: str, age: int, step: int, seed: int) -> None:
    """Groups finish in any order, some fail; with one step per version nothing is ever thrown away."""
    luck = Random(seed)
    buffer = make(sampler, age=age, step=step)
    flying: dict[str, Admitted] = {}
    number = 0
    for version in range(8):
        claim = None
        while claim is None:
            slot = buffer.reserve(str(number), ROWS)
            if isinstance(slot, Admitted):
                flying[slot.uid], number = slot, number + 1
                if luck.random() < 0.6:
                    continue
            done = flying.pop(luck.choice(sorted(flying)))
            if luck.random() < 0.1:
                buffer.fail(done.uid, "unlucky")
            else:
                assert buffer.commit(done.uid, meta_of(done.keys, done.uid), done.version, version)
            claim = buffer.claim(step)
        assert max(claim.ages) <= age
        buffer.trained(claim.uids)
        assert buffer.set_version(version + 1) == ()


def test_training_that_ends_after_the_version_bump_counts_for_its_own_step() -> None:
    for sampler in ("ready_first", "weight_fifo", "in_order"):
        buffer = make(sampler, age=0, step=2)
        for uid in "ab":
            land(buffer, uid)
        claim = buffer.claim(2)
        assert claim is not None
        buffer.set_version(1)
        buffer.trained(claim.uids)
        for uid in "cd":
            land(buffer, uid)
        assert buffer.claim(2) is not None


def test_the_wait_is_explained() -> None:
    clock = Clock()
    buffer = make("weight_fifo", age=1, step=2, clock=clock)
    buffer.reserve("slow", ROWS)
    land(buffer, "quick")
    assert buffer.set_version(1) == ()
    land(buffer, "newer")
    buffer.reserve("broken", ROWS)
    buffer.fail("broken", "EngineDiedError: engine-0 died")
    clock.now += 41
    assert buffer.waiting_for(2) == (
        "1 of 2 groups ready for weight version 1; 1 in flight (the longest, 'slow', for 41 s); 2 stored; 1 failed; "
        "last failure: EngineDiedError: engine-0 died; admission is open; last commit 41 s ago"
    )
    assert buffer.set_version(2) == ("slow", "quick")
    assert "none in flight; 1 stored; 1 cancelled; 1 evicted too_old; 1 failed" in buffer.waiting_for(2)


def test_the_metrics_of_a_short_life() -> None:
    buffer = make(age=2, step=2)
    for uid in "abcd":
        land(buffer, uid)
    assert buffer.set_version(1) == ()
    claim = buffer.claim(1)
    buffer.set_version(2)
    assert claim is not None
    assert buffer.claim(2) is not None
    buffer.release(["b"])
    buffer.trained(claim.uids)
    assert buffer.set_version(3) == ("b", "d")
    assert buffer.metrics() == {
        "replay/admitted": 4, "replay/claimed": 3, "replay/committed": 4, "replay/evicted/too_old": 2, "replay/released": 1,
        "replay/trained": 1, "replay/occupancy": 1 / 6, "replay/occupancy/in_flight": 0, "replay/occupancy/cancelled": 0,
        "replay/occupancy/committed": 0, "replay/occupancy/claimed": 1, "replay/age/1": 1, "replay/age/2": 2, "replay/age/mean": 5 / 3,
    }  # fmt: skip


def test_what_the_states_do_not_allow() -> None:
    buffer = make(capacity=3)
    slot = buffer.reserve("a", ROWS)
    assert isinstance(slot, Admitted)
    meta = meta_of(slot.keys, "a")
    with pytest.raises(GroupStateError, match="group 'a' is in_flight"):
        buffer.reserve("a", ROWS)
    with pytest.raises(GroupStateError, match=r"commit of 1 keys, 2 are reserved, and 'v0_pa_g1' is in one only"):
        buffer.commit("a", meta.slice(0, 1), 0, 0)
    with pytest.raises(GroupStateError, match="last token's weight version 3 is below the first's, 4"):
        buffer.commit("a", meta, 4, 3)
    with pytest.raises(GroupStateError, match="trained: group 'a' is in_flight, not claimed"):
        buffer.trained(["a"])
    with pytest.raises(GroupStateError, match="fail: no group 'z'"):
        buffer.fail("z", "")
    assert buffer.commit("a", meta, 0, 0)
    with pytest.raises(GroupStateError, match="release: group 'a' is committed, not claimed"):
        buffer.release(["a"])
    buffer.set_version(1)
    with pytest.raises(ValueError, match="weight version 0 after 1"):
        buffer.set_version(0)
    with pytest.raises(ValueError, match="claim of 4 groups: the buffer holds 1 to 3"):
        buffer.claim(4)
    with pytest.raises(ValueError, match="group 'b': 0 rows"):
        buffer.reserve("b", 0)


@given(seed=st.integers(0, 2**20), sampler=st.sampled_from(SAMPLERS), age=st.integers(0, 2))
def test_a_restored_ledger_loses_and_doubles_nothing_when_it_issues_its_groups_again(seed: int, sampler: str, age: int) -> None:
    """Whenever a run goes on from its ledger's JSON, keeping some responses: no group is lost, no key made twice, no bound passed."""
    luck, ledger, number = Random(seed), make(sampler, age=age, step=2), 0
    capacity = 2 * (age + 1) if sampler != "windowed" else AsyncConfig(max_trajectory_age_steps=age, sampler=sampler).capacity(2)
    flying: dict[str, Admitted] = {}
    claimed: list[str] = []
    minted: list[str] = []
    trained: list[str] = []
    for _ in range(50):
        match luck.choice(["reserve", "reserve", "reserve", "commit", "commit", "fail", "claim", "trained", "announce", "resume"]):
            case "reserve" if isinstance(slot := ledger.reserve(str(number), ROWS), Admitted):
                flying[slot.uid], number = slot, number + 1
                minted += slot.keys
            case "commit" if flying:
                slot = flying.pop(luck.choice(sorted(flying)))
                ledger.commit(slot.uid, meta_of(slot.keys, slot.uid), slot.version, ledger.state()["version"])
            case "fail" if flying:
                ledger.fail(flying.popitem()[0], "unlucky")
            case "claim" if claim := ledger.claim(1):
                claimed += claim.uids
                if sampler != "ready_first":
                    assert max(claim.ages) <= age
            case "trained" if claimed:
                trained.append(claimed.pop())
                ledger.trained(trained[-1:])
            case "announce":
                ledger.set_version(ledger.state()["version"] + 1)
            case "resume":
                state = json.loads(json.dumps(ledger.state()))
                before = {group["uid"]: group for group in state["groups"]}
                kept = {uid: before[uid]["start_version"] for uid in flying if luck.random() < 0.5}
                ledger = make(sampler, age=age, step=2)
                ledger.restore(state)
                places = ledger.reissue(kept)
                unwanted = [uid for uid, group in before.items() if group["state"] == "cancelled"]
                assert [place.uid for place in places] == [uid for uid in flying if uid not in unwanted]
                for place in places:
                    assert place.version == kept.get(place.uid, state["version"])
                    assert place.target_version == flying[place.uid].target_version
                flying, claimed = {place.uid: place for place in places}, []
                minted += [key for place in places for key in place.keys]
                held = {group["uid"]: group["state"] for group in ledger.state()["groups"]}
                assert set(held.values()) <= {"in_flight", "committed"}
                gone = {uid for uid in before if uid not in held}
                assert all(before[uid]["state"] in ("cancelled", "claimed") for uid in gone)
        held = {group["uid"]: group["state"] for group in ledger.state()["groups"]}
        assert len(held) <= capacity
        assert {uid for uid, state in held.items() if state in ("in_flight", "cancelled")} == set(flying)
        metrics = ledger.metrics()
        ends = sum(
            value
            for name, value in metrics.items()
            if name.startswith(("replay/trained", "replay/failed", "replay/evicted", "replay/dropped"))
        )
        assert metrics.get("replay/admitted", 0) == len(held) + ends == number
    assert len(set(minted)) == len(minted)
    assert len(set(trained)) == len(trained)


class Careless:
    """A sampler that breaks the rules as told."""

    def __init__(self, max_age: int, groups_per_step: int) -> None:
        self.selected: list[str] = []
        self.late: dict[str, str] = {}

    def required_capacity(self) -> int:
        return 1

    def admit(self, state: BufferState) -> Admission | Refusal:
        return Admission()

    def select(self, state: BufferState, count: int) -> Sequence[Group]:
        return [state.groups[uid] for uid in self.selected]

    def evict(self, state: BufferState) -> dict[str, str]:
        return self.late


def test_a_sampler_cannot_have_a_group_trained_twice_or_taken_from_the_trainer() -> None:
    sampler = Careless(1, 1)
    buffer = Ledger(sampler, capacity=9, max_in_flight=9, version=0, clear=lambda keys: None, clock=Clock())
    land(buffer, "a")
    for sampler.selected, count, message in (["a", "a"], 2, "occurs twice"), (["a", "a"], 1, "occurs twice"):
        with pytest.raises(SamplerError, match=message):
            buffer.claim(count)
    land(buffer, "b")
    sampler.selected = ["a", "b"]
    with pytest.raises(SamplerError, match=r"Careless\.select: 2 groups, 1 were asked for"):
        buffer.claim(1)
    assert buffer.claim(2) is not None
    with pytest.raises(SamplerError, match=r"Careless\.select: group 'a' is claimed, not committed"):
        buffer.claim(2)
    sampler.late = {"a": "too_old"}
    with pytest.raises(SamplerError, match=r"Careless\.evict: group 'a' is claimed"):
        buffer.set_version(1)
    assert buffer.state()["version"] == 0


@given(seed=st.integers(0, 2**20), sampler=st.sampled_from(SAMPLERS))
def test_the_state_is_one_json_value_and_the_journal_tells_each_group_s_life(seed: int, sampler: str) -> None:
    """At any point a ledger that is restored goes on as the other; in the journal every admitted group ends once, or is still held."""
    luck, journal = Random(seed), []  # type: ignore[var-annotated]
    ledger, twin = make(sampler, age=1, step=2), make(sampler, age=1, step=2)
    ledger._journal = journal.extend
    flying: list[Admitted] = []
    claimed: list[str] = []
    for number in range(30):
        match luck.choice(["reserve", "commit", "fail", "claim", "trained", "release", "announce"]):
            case "reserve" if isinstance(slot := ledger.reserve(str(number), ROWS), Admitted):
                flying.append(slot)
            case "commit" if flying:
                slot = flying.pop(luck.randrange(len(flying)))
                ledger.commit(slot.uid, meta_of(slot.keys, slot.uid), slot.version, slot.version)
            case "fail" if flying:
                ledger.fail(flying.pop().uid, "unlucky")
            case "claim" if claim := ledger.claim(1):
                claimed += claim.uids
            case "trained" if claimed:
                ledger.trained([claimed.pop()])
            case "release" if claimed:
                ledger.release([claimed.pop()])
            case "announce":
                ledger.set_version(ledger.state()["version"] + 1)
        twin.restore(json.loads(json.dumps(ledger.state())))
        assert (twin.state(), twin.metrics(), twin.waiting_for(1)) == (ledger.state(), ledger.metrics(), ledger.waiting_for(1))
    admitted = [change.uid for change in journal if isinstance(change, Admitted)]
    ended = [change.uid for change in journal if isinstance(change, Ended)]
    assert len(set(ended)) == len(ended)
    assert set(admitted) - set(ended) == {group["uid"] for group in ledger.state()["groups"]}
    assert [change.version for change in journal if isinstance(change, Announced)] == list(range(1, ledger.state()["version"] + 1))
