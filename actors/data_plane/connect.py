"""How any process of a run reaches the run's data plane. Importing this module does not import transfer_queue.

start (driver) ──► DataPlaneAddress, picklable ──► actors, tasks, Ray workers ── connect ──► DataPlane
"""

from __future__ import annotations

from actors.data_plane.address import DataPlaneAddress
from actors.data_plane.interface import DataPlane


def connect(address: DataPlaneAddress, timeout_s: float) -> DataPlane:
    """A client in this process, which must be attached to the run's Ray cluster. Clients of one process share a connection.

    Args:
        timeout_s: longest wait for any one call, in seconds.

    Raises:
        DataPlaneGoneError: the run's data plane has ended, or does not answer.
        DataPlaneError: no Ray cluster is attached.
    """
    from actors.data_plane.transfer_queue import TransferQueuePlane

    return TransferQueuePlane(address, timeout_s)
