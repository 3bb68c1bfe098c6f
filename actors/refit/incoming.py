"""Pieces of an update's weights on their way from the call that brings them to the thread that loads them.

    Engine.feed ──feed──► [ one piece at a time ] ──iterate──► executor: vLLM's update_weights
        ▲                                                          │
        └──────────── returns when the piece is loaded ◄───────────┘

The sender may then overwrite the piece's memory. Pure: no vLLM, no Ray.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

Info = dict[str, Any]  # vLLM's update_info; "names" lists the weights in it


class Incoming:
    """One producer, one consumer. Every wait ends after `timeout_s` seconds at the latest."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._offered: queue.Queue[tuple[Info, Future[None]] | None] = queue.Queue()  # None: closed
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._loading: Future[None] | None = None

    def feed(self, info: Info) -> None:
        """Hand a piece over, and return when it has been loaded.

        Raises:
            RuntimeError: the stream was closed, before or meanwhile; with the reason. TimeoutError: nobody loaded it.
        """
        loaded: Future[None] = Future()
        with self._lock:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            self._offered.put((info, loaded))
        try:
            loaded.result(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"a piece of the weights was not loaded within {self._timeout_s:.0f} s") from None

    def pieces(self, weights: int) -> Iterator[Info]:
        """Pieces in the order of `feed`, until so many weights have come. Asking for the next one says that the last is loaded.

        Raises:
            TimeoutError: the next piece did not come. RuntimeError: the stream was closed.
        """
        left = weights
        while left > 0:
            try:
                offered = self._offered.get(timeout=self._timeout_s)
            except queue.Empty:
                raise TimeoutError(
                    f"the policy sent nothing for {self._timeout_s:.0f} s; {left} of {weights} weights are missing"
                ) from None
            if offered is None:
                raise RuntimeError(self._closed)
            info, self._loading = offered
            yield info
            with self._lock:
                if self._closed is None:
                    self._loading.set_result(None)
                self._loading = None
            left -= len(info["names"])

    def close(self, reason: str) -> None:
        """End the stream: whoever waits, and every later `feed`, raises with the reason. Idempotent; the first reason stays."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            waiting = [self._loading] if self._loading is not None else []
            while not self._offered.empty():
                if (offered := self._offered.get_nowait()) is not None:
                    waiting.append(offered[1])
            self._offered.put(None)
            for future in waiting:
                future.set_exception(RuntimeError(reason))
