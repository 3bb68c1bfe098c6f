"""Several who want one lease at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tasks.lease import BusyError, Lease


def acquired(leases: Sequence[Lease]) -> list[bool]:
    """Which of them got it, when all ask at once."""
    barrier = threading.Barrier(len(leases))

    def take(lease: Lease) -> bool:
        barrier.wait()
        try:
            lease.acquire()
        except BusyError:
            return False
        return True

    with ThreadPoolExecutor(len(leases)) as pool:
        return list(pool.map(take, leases))
