"""Groups in flight: every group is handed out once, whole and in order, or not at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.environments import Problem
from actors.generation.types import GenerationResult
from actors.rollout.in_flight import InFlight, PromptGroup, request_id
from actors.rollout.transitions import Admitted


def group(uid: str, rows: int) -> PromptGroup:
    return PromptGroup(Problem(uid, "1 + 1", "2"), [1], Admitted(uid, tuple(f"v0_p{uid}_g{row}" for row in range(rows)), 0, None))


def result(uid: str, row: int) -> GenerationResult:
    return GenerationResult(request_id(uid, row), [row + 10], [-0.5], "stop", ((0, 1),))


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    removed=st.sets(st.integers(0, 4)),
)
def test_whole_groups_come_once_in_order_and_removed_ones_never(rows: list[int], order, removed: set[int]) -> None:
    flying = InFlight()
    for uid, count in enumerate(rows):
        flying.add(group(str(uid), count))
    events: list[tuple[int, int | None]] = [(uid, row) for uid, count in enumerate(rows) for row in range(count)]
    events += [(uid, None) for uid in removed if uid < len(rows)]
    order.shuffle(events)
    complete, running = [], {request_id(str(uid), row) for uid, row in events if row is not None}
    for uid, row in events:
        if row is None:
            stopped = flying.remove(str(uid))
            assert set(stopped) == {name for name in running if name.startswith(f"{uid}/")}
            continue
        running.discard(request_id(str(uid), row))
        for whole in flying.finish([result(str(uid), row)]):
            complete.append(whole.uid)
            assert [r.token_ids for r in whole.in_order()] == [[i + 10] for i in range(rows[uid])]
    assert len(flying) == 0
    assert len(complete) == len(set(complete))
    assert {str(uid) for uid in range(len(rows))} - set(complete) <= {str(uid) for uid in removed}


def test_the_requests_of_a_group_know_it() -> None:
    flying = InFlight()
    flying.add(group("0.1", 2))
    flying.add(group("0.2", 1))
    assert flying.groups_of(["0.1/0", "0.1/1", "0.2/0", "9.9/0"]) == ["0.1", "0.2"]
    assert flying.finish([result("0.1", 1)]) == []
    assert flying.remove("0.1") == ["0.1/0"]
    assert flying.remove("0.1") == []
    assert [whole.uid for whole in flying.finish([result("0.1", 0), result("0.2", 0)])] == ["0.2"]
    assert flying.uids() == ()
