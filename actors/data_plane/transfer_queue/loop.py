"""LoopThread: an event loop on a thread of its own, for requests from any thread.

thread ── submit(request) ──► Call ── wait, result ──► the answer
                               └───── abandon(undo) ──► the request is cancelled; an answer that comes all the same is undone

Every answer is either received or undone, never both.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

type Request[T] = Coroutine[Any, Any, T]
type Undo[T] = Callable[[T], Request[None]]

_LATE_S = 60.0  # how long an abandoned request may take to end


class LoopStoppedError(RuntimeError):
    """The loop was stopped before the request began."""


class LoopThread:
    """Requests of one loop never run at the same time; between two awaits they need no lock."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, request: Request[T]) -> Call[T]:
        """Begin a request.

        Raises:
            LoopStoppedError.
        """
        call = Call(self, request)
        try:
            self.call_soon(call.begin)
        except RuntimeError as error:  # asyncio's "Event loop is closed"
            request.close()
            raise LoopStoppedError("the event loop was stopped") from error
        return call

    def call_soon(self, callback: Callable[[], Any]) -> None:
        """Call something on the loop's thread."""
        self._loop.call_soon_threadsafe(callback)

    def end(self, work: Request[None]) -> None:
        """Finish an abandoned request in the background. Only from the loop's own thread."""
        task = self._loop.create_task(work)
        self._ending.add(task)  # asyncio itself holds tasks weakly
        task.add_done_callback(self._ending.discard)

    async def settled(self, timeout_s: float) -> None:
        """Requests that were abandoned have ended, or `timeout_s` seconds are over. From the loop's own thread."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=timeout_s)

    def stop(self) -> None:
        """Cancel every request, then end the thread. Idempotent."""
        if self.stopped:
            return
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def stopped(self) -> bool:
        """Whether `stop` has ended the thread."""
        return self._loop.is_closed()

    async def _drain(self) -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            if not (await asyncio.wait(others, timeout=2))[0]:
                break
        self._loop.stop()


class Call[T]:
    """A request that was submitted. Its caller receives the result, or abandons it."""

    def __init__(self, loop: LoopThread, request: Request[T]) -> None:
        self._loop, self._request = loop, request
        self._task: asyncio.Task[T] | None = None
        self._ended: Future[asyncio.Task[T]] = Future()

    def begin(self) -> None:
        """Start it. On the loop's thread."""
        self._task = asyncio.ensure_future(self._request)
        self._task.add_done_callback(self._ended.set_result)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within this time."""
        with contextlib.suppress(TimeoutError):
            self._ended.result(timeout=seconds)
        return self._ended.done()

    def result(self) -> T:
        """What it returned, once it has ended. Raises what it raised; `asyncio.CancelledError` when the loop was stopped."""
        return self._ended.result().result()

    def abandon(self, undo: Undo[T] | None) -> None:
        """Cancel it. `undo` gets its answer, if there is one."""
        with contextlib.suppress(RuntimeError):  # the loop was stopped
            self._loop.call_soon(lambda: self._loop.end(self._end(undo)))

    async def _end(self, undo: Undo[T] | None) -> None:
        assert self._task is not None  # `begin` was called before
        self._task.cancel()
        if not (await asyncio.wait({self._task}, timeout=_LATE_S))[0]:
            self._task.cancel()  # ends a request that `completed` protects
            await asyncio.wait({self._task}, timeout=_LATE_S)
            return
        if not self._task.cancelled() and not self._task.exception() and undo is not None:
            with contextlib.suppress(Exception):  # the queue has gone, and with it what was to be undone
                await undo(self._task.result())


async def completed[T](request: Request[T], undo: Undo[T] | None = None) -> T:
    """The answer to a request that must not be cut short: when the caller is cancelled, it goes on to its end and is undone."""
    task = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        answer = await task
        if undo is not None:
            await undo(answer)
        raise
