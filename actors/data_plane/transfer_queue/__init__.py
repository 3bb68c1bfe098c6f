"""The data plane over TransferQueue: its start and stop for one run, and the client. The only package that imports the library.

    run's Ray namespace                                     process (driver, actor, task)
      data_plane_controller    keys, columns, tags     ◄──┬── Connection, one per process and run: ZMQ, an event loop thread
      data_plane_storage_0..n  values                  ◄──┘      └── TransferQueuePlane: any number, cheap

Sockets have locks (locks.py), as whatever comes through them is unpickled.
`transfer_queue.init()` would share one controller per Ray cluster: two runs would see each other and die together. So the
actors are made here of TransferQueue's own classes, named in the run's namespace, owned by the process that calls `start`.
"""

import actors.data_plane.transfer_queue.lean  # noqa: F401  (before what imports the library)
from actors.data_plane.transfer_queue.plane import TransferQueuePlane
from actors.data_plane.transfer_queue.run import start, stop

__all__ = ["TransferQueuePlane", "start", "stop"]
