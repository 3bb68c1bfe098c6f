"""The data plane over TransferQueue: its start and stop for one run, and the client. The only module that imports transfer_queue.

    run's Ray namespace                                     process (driver, actor, task)
      data_plane_controller    keys, columns, tags     ◄──┬── _Connection, one per process and run: ZMQ, an event loop thread
      data_plane_storage_0..n  values                  ◄──┘      └── TransferQueuePlane: any number, cheap

`transfer_queue.init()` would share one controller per Ray cluster: two runs would see each other and die together. So the
actors are made here from TransferQueue's own classes, named in the run's namespace, owned by the process that calls `start`.

Bookkeeping lives in TransferQueue too, so a put or a get costs no request more than TransferQueue's own:
* a shadow partition "schema::<id>" holds one key per column, whose tags are the column's type and the partition's capacity;
* each sample's tags hold the columns written for it, and come with the answer that resolves keys.
A full partition is noticed by claiming the keys and then counting: whoever went over gives its claim back and waits.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayActorError
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError
from transfer_queue.utils.enum_utils import Role

from actors.data_plane import codec
