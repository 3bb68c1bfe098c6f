"""Which settings a run that is resumed must keep. Pure.

What a run learns from, and how, stays; how it is computed (layout, batching, precision, engines), watched and saved may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Blocks and fields that decide what is learned. `steps` may grow: the learning rate then follows the new length.
_KEPT = (
    "flow", "seed", "mode", "model", "environment", "rewards", "scoring.on_timed_out", "scoring.on_failed", "rollout", "warm_start",
    "asynchronous", "policy.loss", "policy.teacher", "policy.optimizer", "policy.updates_per_step", "data", "batch_size",
)  # fmt: skip


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings, as dotted fields, that differ and must not: each as `field: before -> now`.

    Args:
        before, now: configurations, as `model_dump(mode="json")` gives them.
    """
    flat_before, flat_now = flat(before), flat(now)
    names = [name for name in dict.fromkeys((*flat_before, *flat_now)) if _is_kept(name)]
    return [
        f"{name}: {flat_before.get(name, 'unset')} -> {flat_now.get(name, 'unset')}"
        for name in names
        if flat_before.get(name) != flat_now.get(name)
    ]


def _is_kept(name: str) -> bool:
    return any(name == kept or name.startswith(f"{kept}.") for kept in _KEPT)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted field; what is unset is left out."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            found |= flat(inner, f"{prefix}{name}.")
        elif inner is not None:
            found[f"{prefix}{name}"] = inner
    return found
