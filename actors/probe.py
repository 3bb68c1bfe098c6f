"""Whether a store keeps two writers apart. Leases, checkpoints and promotions rely on it."""

from __future__ import annotations

import uuid

from actors.storage import Folder
from configs.base import ConfigError


def probe(folder: Folder) -> None:
    """See that the store takes writes, and does not let a second writer have a name that is taken.

    Raises:
        ConfigError: it does not.
    """
    name = f"probe-{uuid.uuid4().hex}"
    try:
        first, second = (folder.create(name, content) for content in (b"first", b"second"))
    finally:
        folder.remove(name)
    if not first or second:
        raise ConfigError(
            f"{folder.field}: {folder.url} ignores conditional writes (a name that was taken was written again): two runs could "
            "overwrite each other. Take another store"
        )
