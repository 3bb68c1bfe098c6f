"""LoopThread: an event loop on a thread of its own, for requests from any thread and from any other event loop.

thread  ── wait(request) ───────┐                                 blocks that thread only
                                ▼
                     loop thread: one task per request
                                ▲
asyncio ── await wait_async(request)                              blocks nobody

A result is handed over exactly once. When the caller went away first (cancelled, or past its deadline), `undo` gets the
result instead, so that what a request took can be given back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

type Request[T] = Coroutine[Any, Any, T]
type Undo[T] = Callable[[T], Request[None]]


class LoopStoppedError(RuntimeError):
    """The loop was stopped before the request ended."""


class LoopStuckError(TimeoutError):
    """The request did not end within its limit; requests have deadlines of their own, so the loop's thread is blocked."""


class LoopThread:
    """Requests of one loop never run at the same time; between two awaits they need no lock."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait[T](self, request: Request[T], limit_s: float, undo: Undo[T] | None = None) -> T:
        """Run a request and block this thread until it ends.

        Raises:
            LoopStoppedError, LoopStuckError, or what the request raises.
        """
        future = self._submit(request, undo)
        try:
            return future.result(timeout=limit_s)
        except BaseException as error:
            self._abandon(future, undo)
            if isinstance(error, TimeoutError) and future.cancelled():
                raise LoopStuckError(f"no answer within {limit_s:g} s") from error
            raise

    async def wait_async[T](self, request: Request[T], limit_s: float, undo: Undo[T] | None = None) -> T:
        """The same from a coroutine of another loop. Cancelling it cancels the request."""
        future = self._submit(request, undo)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except BaseException as error:
            self._abandon(future, undo)
            if isinstance(error, TimeoutError) and future.cancelled():
                raise LoopStuckError(f"no answer within {limit_s:g} s") from error
            raise

    def stop(self) -> None:
        """End every request with `LoopStoppedError`, then the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(lambda: self.start(self._drain()))
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def stopped(self) -> bool:
        """Whether `stop` has ended the thread."""
        return self._loop.is_closed()

    def _submit[T](self, request: Request[T], undo: Undo[T] | None) -> Future[T]:
        future: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._begin, request, future, undo)
        except RuntimeError as error:  # asyncio's "Event loop is closed"
            request.close()
            raise LoopStoppedError("the event loop was stopped") from error
        return future

    def _begin[T](self, request: Request[T], future: Future[T], undo: Undo[T] | None) -> None:
        task = self.start(self._carry(request, future, undo))
        future.add_done_callback(lambda done: self._call_soon(task.cancel) if done.cancelled() else None)

    async def settled(self, timeout_s: float) -> None:
        """Requests that were cancelled before the one that asks have ended, or `timeout_s` seconds are over. From the loop's own thread."""
        if ending := [task for task in self._tasks if task.cancelling()]:
            await asyncio.wait(ending, timeout=timeout_s)

    async def _carry[T](self, request: Request[T], future: Future[T], undo: Undo[T] | None) -> None:
        try:
            value = await request
        except asyncio.CancelledError:
            if future.set_running_or_notify_cancel():  # not the caller's doing
                future.set_exception(LoopStoppedError("the event loop was stopped"))
        except BaseException as error:  # noqa: BLE001  (it is the caller's)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(value)
            elif undo is not None:
                self.start(undo(value))

    def _abandon[T](self, future: Future[T], undo: Undo[T] | None) -> None:
        """The caller stops listening: the request is cancelled, or its result is undone."""
        if future.cancel() or undo is None:
            return
        future.add_done_callback(lambda done: None if done.exception() else self._call_soon(lambda: self.start(undo(done.result()))))

    def start(self, work: Request[None]) -> asyncio.Task[None]:
        """Run work in the background. Only from the loop's own thread."""
        task = self._loop.create_task(work)
        self._tasks.add(task)  # asyncio itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task

    def _call_soon(self, callback: Callable[[], Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    async def _drain(self) -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            if not (await asyncio.wait(others, timeout=2))[0]:
                break
        self._loop.stop()
