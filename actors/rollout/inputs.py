"""What each step was made from, kept so that the step can be made again (flows/replay.py).

    data plane ── rows of the step, all columns ──► inputs/step-000137.safetensors    header: order, tags, metrics, settings

A file stays until the oldest checkpoint that is kept is of its step or a later one: nothing could come to the step any more.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from actors.rollout.rows import read_about, read_rows, write_rows

_NAME = re.compile(r"step-(\d{6,})\.safetensors")


class NoInputsError(CheckpointError):
    """A step whose inputs are not there. The message says which are."""


class StepInputs(BaseModel):
    """A step, but for the columns of its rows.

    Attributes:
        weight_version: of the weights that the step began with.
        meta: all rows that it took, in their order; `fields`: the columns that are kept.
        trained: numbers of the rows that it trained on, in their order.
        passed_over: a guard saw before training that it was not to be trained.
        rate: what the learning rate was multiplied by (guards).
        metrics: what its stages reported. A step that failed has none of training.
        config: of the run, YAML. place: what computed it, `PolicyWorker.place`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")  # a loss may be NaN

    step: PositiveInt
    weight_version: NonNegativeInt
    meta: KVBatchMeta
    trained: tuple[NonNegativeInt, ...]
    passed_over: bool
    rate: float
    metrics: dict[str, float]
    config: str
    place: str

    def ended(self, columns: Collection[str], metrics: Mapping[str, float]) -> StepInputs:
        """At the step's end, when there are further columns, and metrics."""
        return self.model_copy(update={"meta": self.meta.with_fields(*columns), "metrics": dict(metrics)})

    @classmethod
    def read(cls, path: Path) -> StepInputs:
        """Without the rows.

        Raises:
            CheckpointError: no such file, or not what `write` makes.
        """
        try:
            return cls.model_validate_json(read_about(path))
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"{path.name}: no inputs of a step: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def write(self, directory: Path, columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Write the step's file; it is whole when it has its name.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = path_of(directory, self.step)
        partial = path.with_name(f".{path.name}")
        try:
            directory.mkdir(exist_ok=True)
            write_rows(partial, self.meta.keys, columns, self.model_dump_json())
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be written: {error}") from error

    def columns(self, directory: Path) -> dict[str, list[torch.Tensor]]:
        """The step's columns, in the order of `meta`.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = path_of(directory, self.step)
        keys, columns = read_rows(path)
        if keys != self.meta.keys or columns.keys() != self.meta.fields:
            raise CheckpointError(f"{path.name}: its rows or columns are not those of its header")
        for name, rows in columns.items():
            if any(row.dim() and len(row) != length for row, length in zip(rows, self.meta.sequence_lengths, strict=True)):
                raise CheckpointError(f"{path.name}: column {name!r} has rows of other lengths than its header")
        return columns


def path_of(directory: Path, step: int) -> Path:
    """The file of a step's inputs."""
    return directory / f"step-{step:06d}.safetensors"


def steps_in(directory: Path) -> list[int]:
    """The steps whose inputs are there, ascending; none when there is no directory."""
    return sorted(int(found[1]) for path in directory.glob("*") if (found := _NAME.fullmatch(path.name)))


def remove(directory: Path, *, after: int, until: int | None = None) -> None:
    """The inputs of the steps after one (until another, which goes as well)."""
    for step in steps_in(directory):
        if step > after and (until is None or step <= until):
            path_of(directory, step).unlink(missing_ok=True)
