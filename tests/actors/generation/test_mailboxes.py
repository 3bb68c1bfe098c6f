"""Results reach the client that they belong to, once."""

from __future__ import annotations

import threading

from actors.generation.mailboxes import Mailboxes
from actors.generation.types import GenerationResult
from tests.patience import WAIT_S


def result(name: str) -> GenerationResult:
    return GenerationResult(name, [1], [-0.5], "stop", ((0, 1),))


def test_two_takers_of_each_of_two_clients_get_every_result_once() -> None:
    boxes, got = Mailboxes(), {"a": [], "b": []}

    def take(client: str) -> None:
        while len(got[client]) < 500:
            got[client].extend(r.request_id for r in boxes.take(client, 0.01))

    takers = [threading.Thread(target=take, args=(client,)) for client in "aabb"]
    for taker in takers:
        taker.start()
    for number in range(500):
        boxes.put("a", result(f"a{number}"))
        boxes.put("b", result(f"b{number}"))
    for taker in takers:
        taker.join(30)
    for client in "ab":
        assert sorted(got[client]) == sorted(f"{client}{number}" for number in range(500))


def test_results_come_in_order_and_stay_until_taken() -> None:
    boxes = Mailboxes()
    boxes.put("a", result("1"))
    boxes.put("a", result("2"))
    assert boxes.take("b", 0.0) == []
    assert [r.request_id for r in boxes.take("a", 0.0)] == ["1", "2"]
    assert boxes.take("a", 0.0) == []


def test_closing_ends_a_wait_but_loses_nothing() -> None:
    boxes = Mailboxes()
    boxes.put("a", result("1"))
    waiting = threading.Thread(target=boxes.take, args=("b", 60.0))
    waiting.start()
    boxes.close()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert [r.request_id for r in boxes.take("a", 60.0)] == ["1"]
    assert boxes.take("a", 60.0) == []
