"""LoopThread: results are handed over once, or undone; nobody waits for a loop that has ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from actors.data_plane.loop import LoopStoppedError, LoopStuckError, LoopThread


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
    assert loop.wait(echo("x"), 10) == "x"
    assert asyncio.run(loop.wait_async(echo("y"), 10)) == "y"
    for call in (lambda: loop.wait(fail(), 10), lambda: asyncio.run(loop.wait_async(fail(), 10))):
        with pytest.raises(KeyError, match="here"):
            call()


def test_a_request_past_its_limit(loop: LoopThread) -> None:
    for call in (lambda: loop.wait(echo("x", 60), 0.05), lambda: asyncio.run(loop.wait_async(echo("x", 60), 0.05))):
        with pytest.raises(LoopStuckError, match=r"0.05 s"):
            call()


def test_stopping_ends_those_who_wait(loop: LoopThread) -> None:
    threading.Timer(0.1, loop.stop).start()
    with pytest.raises(LoopStoppedError):
        loop.wait(echo("x", 60), 60)
    while not loop.stopped:
        time.sleep(0.01)
    with pytest.raises(LoopStoppedError):
        loop.wait(echo("x"), 60)
    loop.stop()


def test_a_result_is_received_or_undone_and_never_both(loop: LoopThread) -> None:
    received, undone, rounds = list[int](), list[int](), 300

    async def undo(number: int) -> None:
        undone.append(number)

    async def give(number: int) -> int:
        await asyncio.sleep(0)
        given.append(number)
        return number

    async def run() -> None:
        for number in range(rounds):
            task = asyncio.create_task(loop.wait_async(give(number), 10, undo))
            for _ in range(1 + number % 7):
                await asyncio.sleep(0)
            time.sleep(number % 5 * 2e-5)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                received.append(task.result())

    given = list[int]()
    asyncio.run(run())
    loop.wait(echo("", 0.05), 10)  # after the undoing
    assert sorted(received + undone) == sorted(given)
