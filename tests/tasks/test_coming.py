"""Samples that are handed on between threads: who waits gets them, or hears that they will not come."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.data_plane.meta import KVBatchMeta
from actors.policy.turns import WithdrawnError
from tasks.coming import Batch

META = KVBatchMeta(partition_id="train", task_name="rollout", keys=("a", "b"), sequence_lengths=(3, 4), tags=({}, {})).with_fields(
    "rewards"
)


def done() -> threading.Event:
    """Of a stage that was sent."""
    event = threading.Event()
    event.set()
    return event


def test_all_who_wait_get_the_samples_each_with_its_columns() -> None:
    batch = Batch()
    more = batch.with_field("policy_logprobs", done()).with_field("reference_logprobs", done())
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(one.meta) for one in (batch, more)]
        batch.samples.arrive(META)
        plain, wider = (future.result(5) for future in waiting)
    assert plain == META
    assert wider == META.with_fields("policy_logprobs", "reference_logprobs")
    assert more.meta() == wider, "again, for a stage that is repeated"


def test_whoever_brings_the_samples_lets_the_first_stage_go_ahead() -> None:
    batch, order = Batch(), []
    sent = batch.samples.sent()

    def bring() -> None:
        batch.samples.arrive(META)
        order.append("brought")

    with ThreadPoolExecutor(1) as threads:
        bringing = threads.submit(bring)
        batch.meta()
        order.append("sent")
        sent.set()
        bringing.result(5)
    assert order == ["sent", "brought"]


def test_a_stage_is_sent_after_the_one_whose_column_it_may_read() -> None:
    batch, order, sent = Batch(), [], threading.Event()
    batch.samples.arrive(META)
    second = batch.with_field("policy_logprobs", sent)
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: (second.meta(), order.append("second")))
        batch.meta()
        order.append("first")
        sent.set()
        later.result(5)
    assert order == ["first", "second"]


def test_who_waits_for_samples_that_will_not_come_is_told() -> None:
    batch = Batch()
    waits = threading.Event()

    def wait() -> KVBatchMeta:
        waits.set()
        return batch.meta()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        waits.wait(5)
        batch.samples.give_up()
        with pytest.raises(WithdrawnError, match="its samples did not come"):
            waiting.result(5)
    batch.samples.arrive(META)  # too late: nobody is waiting
    with pytest.raises(WithdrawnError):
        batch.meta()


def test_samples_that_are_there_stay() -> None:
    batch = Batch()
    batch.samples.arrive(META)
    batch.samples.give_up()
    assert batch.meta() == META
