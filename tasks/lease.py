"""One writer at a time of a folder behind a URL: a registry's nights, or a run's checkpoints, wherever they are started.

    lease/000006.json  released ─┐
                                 ├─► acquire: create 000007 (one of several wins) ─► renew, renew ... ─► release
    lease/000006.json  expired  ─┘                                                        └─► killed: expires

The highest number is the lease; whoever creates the next number holds it. A holder that was paused for too long finds a higher number
and must not go on. Not Prefect's concurrency slots: those know one server only, and a killed holder keeps its slot for five minutes.
Clocks of the machines must agree to within a fraction of the lease's seconds.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ValidationError

from actors.storage import Folder, numbered

_log = logging.getLogger(__name__)
_RENEWALS = 4  # in the time that a lease lasts
_LOOK_S = 1.0


class BusyError(RuntimeError):
    """Another run holds the lease. The message says which."""


class LeaseLostError(RuntimeError):
    """The lease expired, or another run has taken it over: this one must not write any more."""


class _Record(BaseModel, frozen=True, extra="forbid"):
    holder: str
    nonce: str
    expires_at: float  # seconds since the epoch
    released: bool = False


class Lease:
    """A claim on the folder.

    Args:
        holder: name of this run, and what it does, for the message that another run shows.
        seconds: time that the lease lasts without a renewal.
        now: function that returns the seconds since the epoch.
        again: take the lease over from a holder of the same name: an earlier try of this run, which is dead.
    """

    def __init__(self, folder: Folder, holder: str, seconds: float, now: Callable[[], float] = time.time, *, again: bool = False) -> None:
        self._folder, self._holder, self._seconds, self._now, self._again = folder, holder, seconds, now, again
        self._nonce = uuid.uuid4().hex
        self._number, self._expires_at = 0, 0.0

    def acquire(self) -> None:
        """Take the lease.

        Raises:
            BusyError: another run has it, or was faster. ConfigError: the folder cannot be written.
        """
        last = self._folder.last()
        held = self._read(last)
        own = held is not None and self._again and held.holder == self._holder
        if held is not None and not held.released and not own and self._now() < held.expires_at:
            raise BusyError(f"{held.holder} {self._folder.url}")
        number, expires_at = last + 1, self._now() + self._seconds
        name = numbered(number)
        created = self._folder.create(name, self._record(expires_at))
        # A number may be free because it was used long ago and removed: only the highest counts.
        if not created or self._folder.last() != number:
            if created:
                self._folder.remove(name)
            raise BusyError(f"another run began to write into {self._folder.url} at the same moment")
        self._number, self._expires_at = number, expires_at
        for old in self._folder.numbers():
            if old < number:
                self._folder.remove(numbered(old))

    def renew(self) -> None:
        """Hold it for `seconds` from now.

        Raises:
            LeaseLostError: another run has taken it over.
        """
        self._must_be_newest()
        expires_at = self._now() + self._seconds
        self._folder.replace(numbered(self._number), self._record(expires_at))
        self._expires_at = expires_at

    def check(self) -> None:
        """See that it is still held; call before each write that others rely on.

        Raises:
            LeaseLostError.
        """
        self._must_be_newest()
        if self._now() >= self._expires_at:
            raise LeaseLostError(f"the lease on {self._folder.url} could not be renewed in time: this run must not write there any more")

    def release(self) -> None:
        """Let the next run begin at once. Nothing happens when the lease was lost."""
        number, self._number = self._number, 0
        if number and self._folder.last() == number:
            self._folder.replace(numbered(number), self._record(self._now(), released=True))

    @contextmanager
    def held(self, wait_s: float = 0.0) -> Iterator[None]:
        """Take it, renew it in the background, release it at the end of the block.

        Args:
            wait_s: for so long a lease of another may still expire: a holder that was killed did not release it.

        Raises:
            BusyError.
        """
        self._acquire_within(wait_s)
        stop = threading.Event()
        thread = threading.Thread(target=self._keep, args=(stop,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            try:
                self.release()
            except Exception:  # noqa: BLE001  (what the block has done stands, and the lease expires by itself)
                _log.warning("the lease on %s could not be released", self._folder.url, exc_info=True)

    def _acquire_within(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self.acquire()
            except BusyError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_LOOK_S)

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(self._seconds / _RENEWALS):
            try:
                self.renew()
            except LeaseLostError:
                return  # `check` will say so
            except Exception:  # noqa: BLE001  (a store that does not answer now may answer at the next renewal)
                _log.warning("the lease on %s could not be renewed", self._folder.url, exc_info=True)

    def _must_be_newest(self) -> None:
        if self._number == 0 or self._folder.last() != self._number:
            raise LeaseLostError(f"another run has taken over the lease on {self._folder.url}: this one must not write there any more")

    def _record(self, expires_at: float, *, released: bool = False) -> bytes:
        record = _Record(holder=self._holder, nonce=self._nonce, expires_at=expires_at, released=released)
        return record.model_dump_json().encode()

    def _read(self, number: int) -> _Record | None:
        try:
            return _Record.model_validate_json(self._folder.read(numbered(number)) or b"")
        except ValidationError:
            return None  # no record of ours: it bars nobody
