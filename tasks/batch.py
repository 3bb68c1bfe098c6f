"""A step's samples, handed from the task run that makes them to those that use them, within a flow's process.

    rollout ──arrive──► Batch ──meta──► logprob, ref_logprob       task runs that have begun, and wait
            └─────────► its result ───► the flow                   some milliseconds later

A task run costs milliseconds before its work begins and after it has ended. Stages that are submitted while the samples are still being
made have spent theirs when these arrive.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

from actors.data_plane.meta import KVBatchMeta
from actors.policy.turns import WithdrawnError

_HEAD_START_S = 0.5


class Batch:
    """Metadata of samples that may still be to come. For several threads. Goes into a task as `quote(batch)`."""

    def __init__(self) -> None:
        self._arriving: Future[KVBatchMeta] = Future()
        self._fields: tuple[str, ...] = ()
        self.sent = threading.Event()  # the first stage that waits for the samples has sent them on, or will not

    def with_fields(self, *fields: str) -> Batch:
        """The same samples, to which a stage will have added these columns."""
        other = Batch()
        other._arriving, other.sent = self._arriving, self.sent
        other._fields = (*self._fields, *fields)
        return other

    def arrive(self, meta: KVBatchMeta) -> None:
        """The samples are there. Returns when the first stage that waits for them has sent them on: Python runs one thread at a time."""
        if self._arriving.set_running_or_notify_cancel():
            self._arriving.set_result(meta)
            self.sent.wait(_HEAD_START_S)

    def give_up(self) -> None:
        """They will not come; without effect when they have."""
        self._arriving.cancel()

    def meta(self) -> KVBatchMeta:
        """Wait for them.

        Raises:
            WithdrawnError: they will not come.
        """
        try:
            return self._arriving.result().with_fields(*self._fields)
        except CancelledError:
            raise WithdrawnError("it was not begun: its samples did not come") from None
