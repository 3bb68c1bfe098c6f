"""The replay buffer with its lock, its waits and the data plane: in threads, and once as an actor whose collector is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.data_plane.in_memory import MemoryPlane
from actors.data_plane.interface import DataPlane, DataPlaneGoneError
from actors.data_plane.meta import KVBatchMeta
from actors.rollout.audit import audit
from actors.rollout.journal import JournalError, Opening, parse
from actors.rollout.ledger_actor import LedgerActor, LedgerClosedError, LedgerStalledError, Places, ledger_actor_class
from actors.rollout.transitions import Admitted, Committed
from actors.waiting import ActorGoneError, look_for, wait
from configs.staleness import AsyncConfig
from tests.actors.data_plane.conftest import another_client
from tests.patience import WAIT_S

ROWS = 2
SOON = 30.0  # seconds that no test comes near


def new_plane() -> MemoryPlane:
    plane = MemoryPlane(SOON)
    plane.register_partition("train", fields=["input_ids"])
    return plane


def there() -> None:
    """A collector that is alive."""


class Rig:
    """An actor object on an in-memory plane, and the pieces to drive it from several threads."""

    def __init__(self, find_writer: Callable[[], object] = there, journal: Opening | None = None, **config: Any) -> None:
        self.plane = new_plane()
        values = {"max_trajectory_age_steps": 1, "stall_timeout_s": SOON} | config
        self.actor = LedgerActor(AsyncConfig(**values), 2, 0, "train", lambda: another_client(self.plane, SOON), find_writer, journal)
        self.pool = ThreadPoolExecutor(8)

    def go[R](self, call: Callable[..., R], *arguments: Any) -> Future[R]:
        return self.pool.submit(call, *arguments)

    def write(self, uid: str, version: int = 0) -> bool:
        return self.commit(self.reserve(uid), version)

    def reserve(self, uid: str) -> Admitted:
        (given,) = self.actor.reserve([uid], ROWS, SOON).given
        return given

    def commit(self, given: Admitted, version: int) -> bool:
        (wanted,) = self.actor.commit([Committed(given.uid, self.put(given), version, version)])
        return wanted

    def put(self, given: Admitted, rows: int = ROWS) -> KVBatchMeta:
        meta = KVBatchMeta(partition_id="train", keys=given.keys[:rows], sequence_lengths=(3,) * rows)
        return self.plane.put(meta, {"input_ids": [torch.arange(3)] * rows})

    @property
    def rows(self) -> int:
        return self.plane.samples("train")


@pytest.fixture
def made() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**config: Any) -> Rig:
        rigs.append(Rig(**config))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.actor.close()
        rig.pool.shutdown(wait=True)


def test_a_claim_waits_for_its_groups(made: Callable[..., Rig]) -> None:
    rig = made()
    waiting = rig.go(rig.actor.claim, 2, SOON)
    rig.write("a")
    assert not waiting.done()
    rig.write("b")
    claim = waiting.result(SOON).claim
    assert claim is not None
    assert claim.uids == ("a", "b")
    assert [len(row) for row in rig.plane.get(claim.meta, ["input_ids"])["input_ids"]] == [3] * 4
    assert rig.actor.metrics()["replay/claim_wait_s"] > 0
    rig.actor.trained(claim.uids)
    assert rig.rows == 0


def test_a_claim_waits_until_the_step_before_is_settled(made: Callable[..., Rig]) -> None:
    """What became of a step's groups is reported beside the beginning of the next one; the metrics are the same whoever is quicker."""
    rig = made(stall_report_every_s=0.05)
    for uid in "abcd":
        rig.write(uid)
    first = rig.actor.claim(2, 0.0).claim
    assert first is not None
    rig.actor.set_version(1)
    reply = rig.actor.claim(2, 0.2)
    assert reply.claim is None
    assert (
        "2 of 2 groups ready for weight version 1; none in flight; 2 stored; 2 claimed; 2 of an earlier step are not settled"
        in reply.log[0]
    )
    waiting = rig.go(rig.actor.claim, 2, SOON)
    rig.actor.trained(first.uids)
    reply = waiting.result(SOON)
    assert reply.claim is not None
    assert reply.claim.uids == ("c", "d")
    assert (reply.metrics["replay/trained"], reply.metrics["replay/occupancy/claimed"]) == (2.0, 2.0)
    assert rig.actor.claim(1, 0.0).claim is None  # none is left: its own groups do not hold a step up


def test_a_reservation_waits_for_a_place(made: Callable[..., Rig]) -> None:
    rig = made(buffer_capacity=2)
    rig.write("a")
    rig.write("b")
    assert rig.actor.reserve(["c"], ROWS, 0.0) == Places((), ())
    waiting = rig.go(rig.reserve, "c")
    rig.actor.drop(["a"], "zero_variance")
    assert waiting.result(SOON).uid == "c"
    assert rig.rows == ROWS


def test_a_waiting_reservation_says_at_once_and_once_which_group_has_become_too_old(made: Callable[..., Rig]) -> None:
    rig = made(buffer_capacity=2, max_inflight_prompts=2)
    rig.reserve("a")
    rig.reserve("b")
    waiting = rig.go(rig.actor.reserve, ["c"], ROWS, SOON)
    rig.actor.set_version(2)
    places = waiting.result(SOON)
    assert (places.given, set(places.cancelled)) == ((), {"a", "b"})
    waiting = rig.go(rig.actor.reserve, ["c"], ROWS, SOON)  # it does not come back at once: the collector knows
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    rig.actor.fail("a", "too old")
    assert [given.uid for given in waiting.result(SOON).given] == ["c"]


def test_a_waiting_reservation_gets_nothing_once_its_collector_has_given_up(made: Callable[..., Rig]) -> None:
    rig = made(buffer_capacity=2)
    rig.write("stored")
    rig.reserve("a")
    waiting = rig.go(rig.actor.reserve, ["b"], ROWS, SOON)
    while not rig.actor._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert rig.actor.abandon("it was stopped") == ("a",)
    nothing = Places((), ())
    assert waiting.result(SOON) == nothing
    assert rig.actor.reserve(["b"], ROWS, SOON) == nothing  # it was on its way when the collector gave up
    rig.actor.begin_writing()
    assert rig.reserve("c").uid == "c"  # of the next one


def test_prompts_get_places_in_their_order_as_far_as_there_are_any(made: Callable[..., Rig]) -> None:
    rig = made(buffer_capacity=3)
    rig.write("a")
    places = rig.actor.reserve(["b", "c", "d", "e"], ROWS, SOON)  # does not wait: two have a place
    assert [given.uid for given in places.given] == ["b", "c"]
    stored = [Committed(given.uid, rig.put(given), 0, 0) for given in places.given]
    assert rig.actor.commit(stored) == (True, True)
    assert rig.actor.reserve([], ROWS, 0.0) == Places((), ())


def test_half_written_rows_are_rolled_back(made: Callable[..., Rig]) -> None:
    rig = made()
    rig.put(rig.reserve("a"), rows=1)
    rig.actor.fail("a", "the put died half-way")
    assert rig.rows == 0


def test_rows_written_after_their_group_was_evicted_are_cleared(made: Callable[..., Rig]) -> None:
    rig = made()
    given = rig.reserve("a")
    assert rig.actor.set_version(2) == ("a",)
    assert rig.actor.reserve([], ROWS, 0.0).cancelled == ("a",)
    assert rig.rows == 0
    assert rig.commit(given, 0) is False
    assert rig.rows == 0
    assert rig.actor.reserve([], ROWS, 0.0).cancelled == ()


def test_a_plane_that_fails_to_clear_leaves_the_group_where_it_was(made: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = made()
    rig.write("a")
    claim = rig.actor.claim(1, 0.0).claim
    assert claim is not None

    def gone(_: MemoryPlane, meta: KVBatchMeta) -> None:
        raise DataPlaneGoneError("storage unit 0 died")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryPlane, "clear", gone)
        with pytest.raises(DataPlaneGoneError):
            rig.actor.trained(claim.uids)
    assert rig.actor.metrics()["replay/occupancy/claimed"] == 1
    rig.actor.trained(claim.uids)
    assert rig.rows == 0


def test_a_wait_says_what_it_waits_for_and_ends_at_its_deadline(made: Callable[..., Rig]) -> None:
    rig = made(stall_report_every_s=0.05)
    rig.write("a")
    lines: list[str] = []
    while len(lines) < 2:
        reply = rig.actor.claim(2, 0.2)
        assert reply.claim is None
        lines += reply.log
    assert all("1 of 2 groups ready for weight version 0; none in flight; 1 stored; admission is open" in line for line in lines)
    assert rig.actor.claim(1, 0.0).log == ()


def test_a_stalled_collector_is_an_error(made: Callable[..., Rig]) -> None:
    rig = made(stall_timeout_s=0.2, stall_report_every_s=0.1)
    rig.reserve("a")
    with pytest.raises(LedgerStalledError, match=r"no group was committed for \d+\.\d s \(stall_timeout_s = 0.2\).*1 in flight"):
        rig.actor.claim(1, SOON)
    # The clock of a stall starts with the wait, not with the last commit: training may take longer than the timeout.
    assert rig.actor.claim(1, 0.05).claim is None


def test_a_collector_that_gives_up_ends_the_wait(made: Callable[..., Rig]) -> None:
    rig = made()
    rig.write("a")
    rig.reserve("b")
    waiting = rig.go(rig.actor.claim, 2, SOON)
    assert rig.actor.abandon("EngineDiedError: engine-0 died") == ("b",)
    with pytest.raises(LedgerStalledError, match=r"the collector has given up \(EngineDiedError: engine-0 died\)\. 1 of 2 groups ready"):
        waiting.result(SOON)
    assert rig.actor.claim(1, SOON).claim is not None  # what is stored is still good
    rig.actor.begin_writing()
    rig.write("c")
    assert rig.actor.claim(1, SOON).claim is not None
    assert rig.actor.claim(1, 0.0).claim is None


def test_a_collector_that_is_gone_ends_the_wait(made: Callable[..., Rig]) -> None:
    def gone() -> None:
        raise ActorGoneError("actor 'collector' is not in Ray namespace 'grpo-1'")

    rig = made(find_writer=gone)
    rig.write("a")
    assert rig.actor.claim(1, SOON).claim is not None
    with pytest.raises(LedgerStalledError, match=r"the collector is gone \(actor 'collector' is not in Ray namespace 'grpo-1'\)"):
        rig.actor.claim(1, SOON)


def test_a_newer_claim_ends_an_older_ones_wait(made: Callable[..., Rig]) -> None:
    rig = made()
    older = rig.go(rig.actor.claim, 1, SOON)
    while rig.actor._claims == 0:
        threading.Event().wait(0.001)
    newer = rig.go(rig.actor.claim, 1, SOON)
    assert older.result(SOON).claim is None
    rig.write("a")
    assert newer.result(SOON).claim is not None


def test_closing_ends_every_wait_and_leaves_no_rows(made: Callable[..., Rig]) -> None:
    rig = made(buffer_capacity=2)
    rig.write("a")
    rig.write("b")
    claim = rig.actor.claim(1, 0.0).claim
    assert claim is not None
    waits = [rig.go(rig.actor.claim, 2, SOON), rig.go(rig.reserve, "c")]
    rig.actor.close()
    rig.actor.close()
    for waiting in waits:
        with pytest.raises(LedgerClosedError):
            waiting.result(SOON)
    with pytest.raises(LedgerClosedError):
        rig.actor.trained(claim.uids)
    assert rig.rows == 0


def test_writers_and_a_trainer_in_threads_train_every_group_once(made: Callable[..., Rig]) -> None:
    rig = made(sampler="weight_fifo", max_trajectory_age_steps=2)
    steps, seen = 20, list[str]()

    def writer(name: str) -> None:
        for number in range(1000):
            try:
                given = rig.reserve(f"{name}{number}")
                if number % 5 == 0:
                    rig.put(given, rows=1)
                    rig.actor.fail(given.uid, "unlucky")
                else:
                    rig.commit(given, given.version)
            except LedgerClosedError:
                return

    writers = [rig.go(writer, name) for name in "xyz"]
    for step in range(steps):
        claim = rig.actor.claim(2, SOON).claim
        assert claim is not None
        assert max(claim.ages) <= 2
        seen += claim.uids
        assert len(rig.plane.get(claim.meta, ["input_ids"])["input_ids"]) == 2 * ROWS
        rig.actor.trained(claim.uids)
        rig.actor.set_version(step + 1)
    metrics = rig.actor.metrics()
    rig.actor.close()
    for done in writers:
        done.result(SOON)
    assert len(set(seen)) == len(seen) == 2 * steps == metrics["replay/trained"]
    assert "replay/evicted/too_old" not in metrics
    assert rig.rows <= 3 * ROWS  # what a writer put after the end; it never got a commit


def test_the_journal_has_every_change_also_across_a_resume(made: Callable[..., Rig], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    rig = made(journal=Opening(path, "run-1", "digest"))
    assert rig.actor.cut_line() is None
    rig.write("a")
    flying = rig.reserve("b")
    state = rig.actor.cut(1)
    back = rig.actor.cut_line()
    assert back is not None
    segment = rig.actor.segment(0)
    assert segment == path.read_bytes()
    rig.commit(flying, 0)
    claim = rig.actor.claim(2, SOON).claim
    assert claim is not None
    rig.actor.trained(claim.uids)
    assert rig.actor._journal is not None
    rig.actor._journal.close()  # the actor died
    with path.open("ab") as file:
        file.write(b'{"n":')

    other = made(journal=Opening(path, "run-2", "digest", back, "the ledger died"))
    assert other.actor.ready().endswith("; 5 bytes of an unfinished line cut off the journal")
    (place,) = other.actor.restore(state, {})
    assert place.keys != flying.keys
    assert other.commit(place, 0)
    claim = other.actor.claim(2, SOON).claim
    assert claim is not None
    other.actor.trained(claim.uids)
    other.actor.set_version(1)
    other.reserve("c")
    other.actor.close()
    found = audit(parse(path.read_bytes()), [back])
    assert found.verdict == "clean: of 3 groups, 2 trained once, 1 ended with a reason"
    assert (found.finished, found.reissued, found.voided[0].trained, path.read_bytes().startswith(segment)) == (True, 1, 2, True)
    with pytest.raises(JournalError, match="which is another one here"):
        made(journal=Opening(path, "run-3", "digest", (back[0], "0"), ""))
    rig.actor._journal = rig.actor._buffer._journal = None  # it is closed as an actor that never had one


# ---- as an actor ----


class Writer:
    """Stands in for the collector's process: writes nothing, can be killed."""

    def ready(self) -> bool:
        return True


def _open() -> DataPlane:
    return new_plane()


def test_killing_the_collector_ends_the_trainers_wait(ray_session: None) -> None:
    namespace = "test-replay"
    collector = ray.remote(Writer).options(name="collector", namespace=namespace, num_cpus=0).remote()
    config = AsyncConfig(stall_timeout_s=300, stall_report_every_s=0.1)
    replay = (
        ledger_actor_class()
        .options(name="replay", namespace=namespace, num_cpus=0)
        .remote(config, 2, 0, "train", _open, partial(look_for, "collector", namespace))
    )
    try:
        for handle in (collector, replay):
            wait(handle.ready.remote(), who="actor", what="start", timeout_s=WAIT_S)
        (given,) = wait(replay.reserve.remote(["a"], ROWS, 1.0), who="replay", what="reserve", timeout_s=WAIT_S).given
        meta = KVBatchMeta(partition_id="train", keys=given.keys, sequence_lengths=(3, 3))
        waiting = replay.claim.remote(2, 300.0)
        assert wait(replay.commit.remote([Committed("a", meta, 0, 0)]), who="replay", what="commit", timeout_s=WAIT_S) == (True,)
        assert wait(replay.metrics.remote(), who="replay", what="metrics", timeout_s=WAIT_S)["replay/committed"] == 1
        ray.kill(collector)
        with pytest.raises(
            LedgerStalledError, match=r"the collector is gone .*'collector' is not in Ray namespace 'test-replay'.*1 of 2 groups"
        ):
            wait(waiting, who="replay", what="claim", timeout_s=WAIT_S)
        reply = wait(replay.claim.remote(1, 1.0), who="replay", what="claim", timeout_s=WAIT_S)
        assert reply.claim.uids == ("a",)
    finally:
        for handle in (collector, replay):
            ray.kill(handle)
