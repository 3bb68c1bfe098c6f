"""Flow parameters beside recipe and overrides: fields of the form that the UI shows before a run."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PositiveInt

Steps = PositiveInt | None


def with_steps(overrides: Sequence[str] | None, steps: Steps, *instead_of: str) -> list[str]:
    """The overrides, and this number of steps; `instead_of` are overrides that unset what would contradict it."""
    given = list(overrides or ())
    return given if steps is None else [*given, *instead_of, f"steps={steps}"]
