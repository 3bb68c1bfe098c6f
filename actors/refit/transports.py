"""The transports by name (`generation.refit`)."""

from __future__ import annotations

from actors.refit.host import Host
from actors.refit.ipc import Ipc
from actors.refit.nccl import Nccl
from actors.refit.transport import Transport

TRANSPORTS: dict[str, type[Transport]] = {"host": Host, "ipc": Ipc, "nccl": Nccl}
