"""A worker's methods run inside its device's runtime, and say whose fault it is when a peer is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate

from actors.policy import device as devices


def on_device[W, **P, R](method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Run a method of `PolicyWorker` inside the device's runtime (CPU shim, or CUDA's current device), on whichever thread it is called.

    Raises:
        PeerLostError: a collective inside it failed.
    """

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with devices.runtime(self._device):
                return method(self, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, devices.PeerLostError) or not devices.is_collective_failure(error):
                raise
            raise devices.PeerLostError(
                f"{method.__name__}: policy worker {self._rank} of {self._config.parallel.world_size} lost contact with another, "
                f"or waited longer than policy.timeout_s = {self._config.timeout_s:g} s for it ({str(error).splitlines()[0]})"
            ) from error

    return call  # type: ignore[return-value]
