"""Finished responses, kept apart by client until each client takes its own. Threads only: no Ray, no vLLM.

step thread ── put(client, result) ──► [client a: r3, r1] ◄── take("a", timeout) ── a thread per waiting client
                                       [client b: r2]
"""

from __future__ import annotations

import threading

from actors.generation.types import GenerationResult


class Mailboxes:
    """One list of results per client. A client that never takes keeps its results here."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._boxes: dict[str, list[GenerationResult]] = {}
        self._closed = False

    def put(self, client: str, result: GenerationResult) -> None:
        """Add to the client's results, and wake whoever waits for them."""
        with self._arrived:
            self._boxes.setdefault(client, []).append(result)
            self._arrived.notify_all()

    def take(self, client: str, timeout_s: float) -> list[GenerationResult]:
        """All results of the client that are here, in the order in which they finished; waits for the first. Each is taken once.

        Returns:
            At least one; none only at the deadline, or at once when the boxes are closed.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: client in self._boxes or self._closed, timeout_s)
            return self._boxes.pop(client, [])

    def close(self) -> None:
        """No more results will come: nobody waits from now on."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
