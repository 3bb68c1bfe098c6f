"""Modules that a library imports and this project never uses: some cost a second of CPU in every process of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """Whatever is asked of it is `Any`: it may stand in annotations, which Ray pickles with an actor's class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any


@contextmanager
def without(*names: str) -> Iterator[None]:
    """What is imported inside the block gets stand-ins for modules of these names that nobody has imported yet. After it they can be
    imported as ever.

    Args:
        names: also of the packages around them.
    """
    standing_in = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(standing_in)
    try:
        yield
    finally:
        for name in standing_in:
            del sys.modules[name]
