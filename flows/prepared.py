"""What is known of a run before anything starts. The command line checks model and data first, so that a wrong input costs seconds; the
flow then takes over what was found, in place of writing the model and reading the data again.

    command line ── prepare ──► handed ──► the flow's session ── taken ──► run directory
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from configs.run import BaseConfig


@dataclass(frozen=True)
class Prepared:
    """The model's directory, and the steps of the run."""

    model_path: str
    steps: int


_handed: list[tuple[BaseConfig, Prepared, Path]] = []


@contextmanager
def handed(config: BaseConfig, found: Prepared | None, scratch: Path) -> Iterator[None]:
    """What was found is there for the one run of this configuration that begins inside the block.

    Args:
        found: None: nothing that a run could take over. scratch: where the model was written, if it was.
    """
    if found is not None:
        _handed.append((config, found, scratch))
    try:
        yield
    finally:
        _handed.clear()


def taken(config: BaseConfig, directory: Path) -> Prepared | None:
    """What was handed over for this configuration, with the model's files in `directory` if they were written for the run; once."""
    for entry in _handed:
        known, found, scratch = entry
        if known == config:
            _handed.remove(entry)
            if Path(found.model_path) != scratch:
                return found
            shutil.copytree(scratch, directory, copy_function=shutil.move, dirs_exist_ok=True)
            return replace(found, model_path=str(directory))
    return None
