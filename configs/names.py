"""The nearest valid name, for messages about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A question that holds the nearest of the names; `otherwise` when none is as similar as `cutoff` (`difflib.get_close_matches`)."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise
