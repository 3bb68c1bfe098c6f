"""Sharded tensors of all ranks as files in Megatron's "torch_dist" format, which any other layout of the same model can read.

    plan (a collective, once)          write (no collective: any thread)               finish (rank 0)
    every rank's tensors ──► plan ──►  __<rank>_0.distcp, by every rank  ──results──►  .metadata, metadata.json

`megatron.core.dist_checkpointing.load` reads them. Its `save` is not used: it plans and gathers by collectives, which training makes too.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StoragePrefix

from actors.checkpoints.errors import CheckpointError

# Megatron's way of calling torch's loader, for which torch has warnings at every load and for every tensor.
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\.")
warnings.filterwarnings("ignore", message="Please use DTensor instead and we are deprecating ShardedTensor", category=FutureWarning)

METADATA = ".metadata"
_COMMON = "common_state"  # what Megatron's `load` asks for in every checkpoint


class ShardedFiles:
    """Writes the tensors of a state dict, as they are when `write` is called, as often as one likes.

    Args:
        state_dict: this rank's ShardedTensors (and factories of them) over host memory; only those that this rank is to write.
            All ranks' together must be every tensor once. The constructor is a collective.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self._rank = torch.distributed.get_rank()
        shards, _ = save_preprocess(dict(state_dict))
        if self._rank == 0:
            shards[_COMMON] = ShardedObject(_COMMON, {}, (1,), (0,))
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(shards, keep_only_main_replica=True)
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(by_key), is_coordinator=self._rank == 0)
        mine = self._planner.create_local_plan()
        plans: list[Any] | None = [None] * torch.distributed.get_world_size() if self._rank == 0 else None
        torch.distributed.gather_object(mine, plans)
        self._metadata: Any = self._planner.create_global_plan(plans)[1] if plans is not None else None
        self._plan = self._planner.finish_plan(dataclasses.replace(mine, storage_data=_StoragePrefix(f"__{self._rank}_")))

    def write(self, directory: str) -> list[Any]:
        """Write this rank's file, and wait until it is on the disk. Returns what `finish` needs of every rank.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            written: list[Any] = FileSystemWriter(directory).write_data(self._plan, self._planner).value()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"policy worker {self._rank} cannot write its part of {directory}: {error}") from error
        return written

    def finish(self, directory: str, results: list[list[Any]]) -> None:
        """Write the index of what all ranks wrote; to be called on rank 0.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            FileSystemWriter(directory).finish(self._metadata, results)
            save_config(CheckpointingConfig("torch_dist", 1), directory)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{directory}/{METADATA} cannot be written: {error}") from error


def check(directory: str, wanted: Mapping[str, Any], prefixes: tuple[str, ...]) -> None:
    """Compare the index with the tensors of a model, before any is read. A collective: other ranks' tensors are no surprise.

    Args:
        wanted: ShardedTensors and factories of this rank. Where Megatron pads the vocabulary, that axis is not compared.
        prefixes: of keys that all belong to the model.

    Raises:
        CheckpointError: a file is missing, unreadable or too short; a tensor is missing, not known, or of another shape.
    """
    mine: dict[str, tuple[tuple[int, ...], bool]] = {}
    for tensor in _tensors(dict(wanted)):
        mine[tensor.key] = (tuple(tensor.global_shape), tensor.allow_shape_mismatch)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    expected = {key: shape for part in everyone for key, shape in part.items()}
    stored = {key: shape for key, shape in _index(directory).items() if key.startswith(prefixes)}
    for problem, names in (("lacks", expected.keys() - stored.keys()), ("has, unknown to this model,", stored.keys() - expected.keys())):
        if names:
            raise CheckpointError(f"{directory}/{METADATA} {problem} {min(names)} ({len(names)} such tensors)")
    for key in sorted(expected):
        shape, padded = expected[key]
        axes = slice(1 if padded else 0, None)
        if stored[key][axes] != shape[axes] or len(stored[key]) != len(shape):
            raise CheckpointError(f"{directory}/{METADATA}: {key} has shape {list(stored[key])}, this model's has {list(shape)}")


def read(directory: str, wanted: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full local tensors by the keys of `wanted`, whose ShardedTensors (and factories) say what of the stored ones is this rank's.

    Values are converted to the dtypes of their tensors. No collective.

    Raises:
        CheckpointError: the files cannot be read. Nothing but the tensors of `wanted` was changed.
    """
    try:
        found: dict[str, torch.Tensor] = dist_checkpointing.load(dict(wanted), directory, validate_access_integrity=False)
    except (Exception, CheckpointException) as error:  # readers of pickles and zips raise anything, and torch's own is no Exception
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise CheckpointError(f"the tensors in {directory} cannot be read: {type(first).__name__}: {first}") from error
    return {name: found[name] for name in wanted}


def _tensors(wanted: Any) -> list[ShardedTensor]:
    if isinstance(wanted, ShardedTensor):
        return [wanted]
    if hasattr(wanted, "build"):  # a factory: one parameter that is several tensors
        return _tensors(wanted.build())
    values = wanted.values() if isinstance(wanted, dict) else wanted
    return [tensor for value in values for tensor in _tensors(value)]


def _index(directory: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors. Each file is long enough for what the index says of it."""
    try:
        metadata = FileSystemReader(directory).read_metadata()
        shapes = {key: tuple(stored.size) for key, stored in metadata.state_dict_metadata.items() if hasattr(stored, "size")}
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{directory}/{METADATA} cannot be read: {type(error).__name__}: {error}") from error
    for name, end in sorted(ends.items()):
        path = os.path.join(directory, name)
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None or size < end:
            raise CheckpointError(f"{path}: {'is missing' if size is None else f'has {size} bytes'}, {end} were written")
    return shapes
