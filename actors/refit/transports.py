"""The transports by name (`generation.refit`)."""

from __future__ import annotations

from typing import Literal

from actors.refit.host import Host
from actors.refit.ipc import Ipc
from actors.refit.nccl import Nccl
from actors.refit.transport import Transport, TransportName

TRANSPORTS: dict[TransportName, type[Transport]] = {"host": Host, "ipc": Ipc, "nccl": Nccl}


def transport_class(name: TransportName | Literal["auto"]) -> type[Transport]:
    """The transport of that name; of an engine that no placement has told otherwise ("auto"): host."""
    return TRANSPORTS["host" if name == "auto" else name]
