"""Pieces of the weights: each is loaded before its sender goes on, and no side waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actors.refit.transport import Incoming
from tests.patience import WAIT_S


def piece(*names: str) -> dict[str, Any]:
    return {"names": list(names)}


def test_a_sender_goes_on_once_its_piece_is_loaded() -> None:
    incoming = Incoming(WAIT_S)
    loaded: list[list[str]] = []

    def load() -> None:
        loaded.extend(info["names"] for info in incoming.pieces(3))

    with ThreadPoolExecutor(1) as pool:
        consumer = pool.submit(load)
        incoming.feed(piece("a", "b"))
        assert loaded == [["a", "b"]]
        incoming.feed(piece("c"))
        consumer.result(WAIT_S)
    assert loaded == [["a", "b"], ["c"]]


def test_a_piece_may_come_before_the_update_that_takes_it() -> None:
    incoming = Incoming(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(incoming.feed, piece("a"))
        assert list(incoming.pieces(1)) == [piece("a")]
        feeding.result(WAIT_S)


def test_a_policy_that_sends_nothing_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"the policy sent nothing.*2 of 2 weights are missing"):
        next(Incoming(0.05).pieces(2))


def test_an_engine_that_loads_nothing_is_noticed() -> None:
    with pytest.raises(TimeoutError, match="not loaded within"):
        Incoming(0.05).feed(piece("a"))


def test_closing_frees_a_sender_and_refuses_later_ones() -> None:
    incoming, taken = Incoming(WAIT_S), threading.Event()

    def load_one_and_fail() -> None:
        next(incoming.pieces(2))
        taken.set()
        incoming.close("the engine failed")
        incoming.close("later")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(load_one_and_fail)
        with pytest.raises(RuntimeError, match="the engine failed"):
            incoming.feed(piece("a"))
    assert taken.is_set()
    with pytest.raises(RuntimeError, match="the engine failed"):
        incoming.feed(piece("b"))
