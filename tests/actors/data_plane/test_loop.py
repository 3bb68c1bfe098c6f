"""LoopThread: answers are received or undone; nobody waits for a loop that has ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from actors.data_plane.transfer_queue.loop import LoopStoppedError, LoopThread, completed
from tests.patience import WAIT_S


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.stop()


async def echo(value: str, after_s: float = 0.0) -> str:
    await asyncio.sleep(after_s)
    return value


async def fail() -> None:
    raise KeyError("here")


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    call = loop.submit(echo("x"))
    assert call.wait(WAIT_S)
    assert call.result() == "x"
    failing = loop.submit(fail())
    assert failing.wait(WAIT_S)
    with pytest.raises(KeyError, match="here"):
        failing.result()
    assert not loop.submit(echo("x", 60)).wait(0.05)


def test_stopping_ends_those_who_wait(loop: LoopThread) -> None:
    call = loop.submit(echo("x", WAIT_S))
    threading.Timer(0.1, loop.stop).start()
    assert call.wait(WAIT_S)
    with pytest.raises(asyncio.CancelledError):
        call.result()
    while not loop.stopped:
        time.sleep(0.01)
    with pytest.raises(LoopStoppedError):
        loop.submit(echo("x"))
    call.abandon(None)
    loop.stop()


@pytest.mark.parametrize("protected", [False, True])
def test_a_result_is_received_or_undone_and_never_both(loop: LoopThread, protected: bool) -> None:
    received, undone, given = list[int](), list[int](), list[int]()

    async def undo(number: int) -> None:
        undone.append(number)

    async def give(number: int) -> int:
        for _ in range(number % 5):
            await asyncio.sleep(0)
        given.append(number)
        return number

    async def guarded(number: int) -> int:
        return await completed(give(number), undo)

    for number in range(300):
        call = loop.submit((guarded if protected else give)(number))
        if call.wait(number % 7 * 2e-5):
            received.append(call.result())
        else:
            call.abandon(undo)
    settled = loop.submit(loop.settled(WAIT_S))
    assert settled.wait(WAIT_S)
    assert sorted(received + undone) == sorted(given)
