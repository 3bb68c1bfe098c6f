"""Values that are handed from one task run of a flow to others, within its process, before the flow itself has them.

    rollout ──arrive──► samples ──value──► logprob, ref_logprob        task runs that have begun, and wait
            └─────────► its result ──────► the flow                    some milliseconds later

A task run costs milliseconds before its work begins and after it has ended. One that is submitted before its input is there has spent
the first of them when this arrives, and is not kept waiting by the last of the one before.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from actors.data_plane.meta import KVBatchMeta
from actors.policy.turns import WithdrawnError

HEAD_START_S = 0.5  # the longest wait for another thread's call to leave


class Coming[T]:
    """A value that may still be to come. For several threads of one process. Goes into a task as `quote(coming)`.

    A wait for it has no deadline of its own: who brings it has one, and when that fails the flow gives up what waits (`Step.withdraw`).
    """

    def __init__(self, what: str) -> None:
        """
        Args:
            what: in the plural, for the message that it will not come.
        """
        self._what = what
        self._future: Future[T] = Future()
        self._sent: threading.Event | None = None

    def sent(self) -> threading.Event:
        """For stages that wait for the value: the first one sets it when it has sent the value on, or will not."""
        self._sent = self._sent or threading.Event()
        return self._sent

    def arrive(self, value: T) -> None:
        """It is there. Returns when a stage that waits for it has sent it on: Python runs one thread at a time."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(value)
            if self._sent:
                self._sent.wait(HEAD_START_S)

    def give_up(self) -> None:
        """It will not come; without effect when it has."""
        self._future.cancel()

    def value(self) -> T:
        """Wait for it.

        Raises:
            WithdrawnError: it will not come.
        """
        try:
            return self._future.result()
        except CancelledError:
            raise WithdrawnError(f"it was not begun: its {self._what} did not come") from None


@dataclass(frozen=True)
class Batch:
    """Metadata of samples that may still be to come, and columns that stages will have added to them.

    Attributes:
        sent: set when the stage that adds the last of the columns has been sent; None: no stage adds any.
    """

    samples: Coming[KVBatchMeta] = field(default_factory=lambda: Coming("samples"))
    fields: tuple[str, ...] = ()
    sent: threading.Event | None = None

    def with_field(self, name: str, sent: threading.Event) -> Batch:
        """The same samples with one more column."""
        return Batch(self.samples, (*self.fields, name), sent)

    def meta(self) -> KVBatchMeta:
        """Wait for them, and for the stage before to be sent: the workers begin with that one.

        Raises:
            WithdrawnError: they will not come.
        """
        meta = self.samples.value()
        if self.sent:
            self.sent.wait(HEAD_START_S)
        return meta.with_fields(*self.fields)
