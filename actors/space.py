"""Whether a disk has room for what a run will write: asked before the run starts, and again before each large write.

planned ──► needs by path ──► by disk ──► too little for the least: ConfigError; for all that may come: a warning
require ──► NoSpaceError before the write, not half a file after it
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.base import ConfigError
from configs.checkpoint import CheckpointConfig

MARGIN = 16 * 2**20  # logs, metrics, and what no shape tells
_STATE_BYTES = 12  # of a parameter in a checkpoint: master weight and two moments, float32

type Free = Callable[[Path], int]


class NoSpaceError(ConfigError):
    """A disk has no room for what would be written next. The message names the path, what is needed and what is free."""


@dataclass(frozen=True)
class Need:
    """What goes to one path, in bytes: at least, and at most."""

    path: Path
    what: str
    least: float
    most: float


@dataclass(frozen=True)
class Sizes:
    """Of what a run writes, in bytes: one checkpoint, the reference weights that all share (0: none), one `hf` directory."""

    checkpoint: float
    reference: float
    export: float

    @classmethod
    def of(cls, parameters: int, bytes_per_weight: int, *, reference: bool) -> Sizes:
        """Of a model with so many parameters."""
        weights = parameters * bytes_per_weight
        return cls(parameters * _STATE_BYTES, weights if reference else 0, weights)


def planned(
    sizes: Sizes, rules: CheckpointConfig, steps: int, checkpoints: Path | None, run: Path, exports: int, there: int = 0
) -> list[Need]:
    """What a run will write.

    Args:
        checkpoints: their local directory; None: they go to a store elsewhere, by way of `run`.
        exports: `hf` directories at its end, at most. there: bytes that lie in `checkpoints` already, of the run that goes on.
    """
    every = rules.every_steps
    saved = 1 if every is None else math.ceil(steps / every)  # without `every`: the one of a run that is asked to end
    stay = rules.keep_last + rules.keep_best + (steps // math.lcm(every, rules.keep_every) if every and rules.keep_every else 0)
    most = min(saved, stay + 1)  # one is written before an old one goes
    needs = [Need(run, "hf", sizes.export, sizes.export * exports)]
    if checkpoints is None:
        return [*needs, Need(run, "a checkpoint on its way", sizes.checkpoint, sizes.checkpoint)]
    least = min(saved, 2) * sizes.checkpoint + sizes.reference
    whole = most * sizes.checkpoint + sizes.reference
    return [*needs, Need(checkpoints, f"{most} checkpoints", max(least - there, 0), max(whole - there, 0))]


def check_room(needs: Sequence[Need], free: Free | None = None) -> list[str]:
    """Returns a warning for each disk that has room for the least, and not for all that may come.

    Raises:
        NoSpaceError: a disk has not even that.
    """
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_existing(need.path).stat().st_dev, []).append(need)
    warnings = []
    for of_disk in disks.values():
        path, there = of_disk[0].path, (free or free_bytes)(of_disk[0].path)
        least, most = sum(need.least for need in of_disk) + MARGIN, sum(need.most for need in of_disk) + MARGIN
        parts = ", ".join(f"{need.what} {size(need.most)}" for need in of_disk)
        if there < least:
            raise NoSpaceError(
                f"{path}: the run will write at least {size(least)} there (up to: {parts}), and {size(there)} are free: free some, or set "
                "output_dir or checkpoint.url to another disk"
            )
        if there < most:
            warnings.append(
                f"{path}: the run may write {size(most)} there ({parts}), and {size(there)} are free: it will end, saved, when that is "
                "too little. checkpoint.keep_last and checkpoint.keep_every say how many checkpoints stay"
            )
    return warnings


def require(path: Path, needed: float, what: str, free: Free | None = None) -> None:
    """See that there is room for a write.

    Raises:
        NoSpaceError: there is not.
    """
    if (there := (free or free_bytes)(path)) < needed + MARGIN:
        raise NoSpaceError(f"{path}: no room for {what}: {size(needed + MARGIN)} are needed, and {size(there)} are free")


def free_bytes(path: Path) -> int:
    """Of the disk where the path is, or will be."""
    return shutil.disk_usage(_existing(path)).free


def same_disk(one: Path, other: Path) -> bool:
    """Whether both are, or will be, on one disk."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def written(directory: Path) -> int:
    """Bytes of all files below; 0: there is no such directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def size(number: float) -> str:
    """For a person."""
    for unit, bytes_ in (("TiB", 2**40), ("GiB", 2**30)):
        if number >= bytes_:
            return f"{number / bytes_:.1f} {unit}"
    return f"{number / 2**20:.1f} MiB"


def _existing(path: Path) -> Path:
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


class Room:
    """What one run asks of its disks.

    Args:
        exports: `hf` directories at the run's end, at most. checkpoints: their local directory; None: a store elsewhere.
        run: directory of the run.
    """

    def __init__(self, sizes: Sizes, exports: int, checkpoints: Path | None, run: Path, free: Free = free_bytes) -> None:
        self._sizes, self._exports, self._checkpoints, self._run, self._free = sizes, exports, checkpoints, run, free

    def check(self, rules: CheckpointConfig, steps: int) -> list[str]:
        """Before the run. Returns warnings. Raises NoSpaceError."""
        there = written(self._checkpoints) if self._checkpoints else 0
        return check_room(planned(self._sizes, rules, steps, self._checkpoints, self._run, self._exports, there), self._free)

    def learn(self, checkpoint: int) -> None:
        """Bytes of a checkpoint that was written."""
        self._sizes = replace(self._sizes, checkpoint=max(self._sizes.checkpoint, checkpoint))

    def require_checkpoint(self, rules: CheckpointConfig, step: int, standing: int, with_reference: bool) -> bool:
        """See that there is room for a checkpoint. True: after it there is none for the next one, or for what the run's end writes.

        Args:
            standing: number of checkpoints. with_reference: the reference weights are written with it, by way of the run's directory.

        Raises:
            NoSpaceError: there is not.
        """
        path, needed = self._checkpoints or self._run, self._sizes.checkpoint
        require(path, needed + 2 * with_reference * self._sizes.reference, f"the checkpoint of step {step}", self._free)
        grows = bool(self._checkpoints) and (rules.keep_every is not None or standing < rules.keep_last + rules.keep_best)
        left = self._free(path) - MARGIN - needed * grows
        return left < needed + (self._exports * self._sizes.export if same_disk(path, self._run) else 0)

    def require_export(self) -> None:
        """See that there is room for one `hf` directory. Raises NoSpaceError."""
        require(self._run, self._sizes.export, "hf", self._free)
