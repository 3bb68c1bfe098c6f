"""Every call comes to exactly one part, whatever workers do, and no worker holds more than its chunk."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.dispatch import Batch, Dispatch
from actors.environments.scoring.verdict import Part
from actors.environments.scoring.wire import Call, WireError

PROBLEM, RESPONSE = Problem("p", "q", "a"), Response("r", 1, False)
LIMIT = 5.0


def add(dispatch: Dispatch, first: int, count: int, deadline: float) -> Batch:
    batch = Batch([Call(first + i, "exact", PROBLEM, RESPONSE) for i in range(count)], deadline)
    dispatch.add(batch)
    return batch


def test_a_hung_call_times_out_alone_and_the_rest_of_its_chunk_goes_elsewhere() -> None:
    dispatch = Dispatch(lambda _: LIMIT, workers=1)
    batch = add(dispatch, 0, 6, deadline=100.0)
    assert [call.number for call in dispatch.assign(0, 0.0)] == [0, 1, 2]
    dispatch.answered(0, 0, Part(1.0), 1.0)
    assert dispatch.next_deadline() == 6.0  # the second one began when the first was answered
    assert dispatch.late(5.9) == []
    ((worker, why),) = dispatch.late(6.0)
    assert (worker, why) == (0, "no value within 5 s")
    dispatch.lost(0, "timed_out", why, 6.0)
    assert not batch.future.done()
    assert batch.parts[1] == Part(None, "timed_out", 5.0, why)
    assert [call.number for call in dispatch.assign(7, 6.0)] == [2, 3]  # before those that never began


def test_what_a_batch_has_no_time_for_counts_as_timed_out() -> None:
    dispatch = Dispatch(lambda _: LIMIT, workers=1)
    batch = add(dispatch, 0, 4, deadline=3.0)
    assert [call.number for call in dispatch.assign(0, 0.0)] == [0, 1]
    assert dispatch.next_deadline() == 3.0
    dispatch.expire(3.0)
    assert not batch.future.done()  # one is running
    assert {number: part.outcome for number, part in batch.parts.items()} == dict.fromkeys((1, 2, 3), "timed_out")
    assert dispatch.late(3.0) == [(0, "the batch's time was over")]
    dispatch.lost(0, "timed_out", "the batch's time was over", 3.0)
    assert [part.outcome for part in batch.future.result(0)] == ["timed_out"] * 4
    assert dispatch.assign(1, 3.0) == []


def test_answers_that_nobody_asked_for_are_refused() -> None:
    dispatch = Dispatch(lambda _: LIMIT, workers=1)
    add(dispatch, 0, 2, deadline=9.0)
    dispatch.assign(0, 0.0)
    for wrong in (
        lambda: dispatch.answered(0, 1, Part(1.0), 0.0),
        lambda: dispatch.answered(3, 0, Part(1.0), 0.0),
        lambda: dispatch.rested(0),
    ):
        try:
            wrong()
        except WireError:
            continue
        raise AssertionError("accepted")


@given(st.integers(1, 500), st.integers(1, 8))
def test_chunks_share_out_what_waits(count: int, workers: int) -> None:
    dispatch = Dispatch(lambda _: LIMIT, workers)
    add(dispatch, 0, count, deadline=9.0)
    sizes = []
    worker = 0
    while chunk := dispatch.assign(worker, 0.0):
        sizes.append(len(chunk))
        worker += 1
    assert sum(sizes) == count
    assert max(sizes) <= max(1, min(64, count // (2 * workers)))


class DispatchMachine(RuleBasedStateMachine):
    """Workers answer, rest, hang, die and come back; batches come and run out of time."""

    @initialize(workers=st.integers(1, 4))
    def begin(self, workers: int) -> None:
        self.dispatch = Dispatch(lambda _: LIMIT, workers)
        self.now, self.next_call, self.next_worker = 0.0, 0, workers
        self.chunks: dict[int, list[int]] = {}
        self.free = list(range(workers))
        self.batches: list[Batch] = []

    @rule(count=st.integers(1, 12), patience=st.floats(0.5, 40.0))
    def add(self, count: int, patience: float) -> None:
        self.batches.append(add(self.dispatch, self.next_call, count, self.now + patience))
        self.next_call += count

    @precondition(lambda self: self.free)
    @rule()
    def assign(self) -> None:
        worker = self.free[0]
        chunk = self.dispatch.assign(worker, self.now)
        if chunk:
            self.chunks[worker] = [call.number for call in chunk]
            self.free.pop(0)

    @precondition(lambda self: any(self.chunks.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, numbers in self.chunks.items() if numbers]))
        self.dispatch.answered(worker, self.chunks[worker].pop(0), Part(1.0), self.now)
        if not self.chunks[worker]:
            self.dispatch.rested(worker)
            del self.chunks[worker]
            self.free.append(worker)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.replace(data.draw(st.sampled_from(sorted(self.chunks))), "failed")

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker, _ in self.dispatch.late(self.now):
            self.replace(worker, "timed_out")
        self.dispatch.expire(self.now)

    def replace(self, worker: int, outcome: str) -> None:
        self.dispatch.lost(worker, outcome, "why", self.now)
        del self.chunks[worker]
        self.free.append(self.next_worker)
        self.next_worker += 1

    @invariant()
    def no_call_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "batches"):
            return
        for batch in self.batches:  # a future that is set twice raises
            assert batch.future.done() == (len(batch.parts) == len(batch.calls)) == (batch not in self.dispatch.batches)
        held = [number for numbers in self.chunks.values() for number in numbers]
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        if not hasattr(self, "batches"):
            return
        self.now += 1000.0  # every batch's time is over: all come to an end
        for worker, _ in self.dispatch.late(self.now):
            self.replace(worker, "timed_out")
        self.dispatch.expire(self.now)
        assert all(len(batch.future.result(0)) == len(batch.calls) for batch in self.batches)
        assert self.dispatch.next_deadline() is None


TestDispatchMachine = DispatchMachine.TestCase
