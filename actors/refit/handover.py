"""Weights on their way into an engine: checked against the checkpoint first, then handed over without a file.

    {name: tensor} ── checked ──► in_process: the same tensors          ──► vLLM loads
                          └─────► async: SharedWeights (memory file) ──► engine core maps it, vLLM loads
    Manifest ── check ──► what a policy on GPUs will send (senders.py) ──► vLLM's own transfer engines

Names are those of the Hugging Face checkpoint that the engine was started from. Does not import vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from actors.generation.types import WeightMismatchError

_ALIGNMENT = 64  # bytes; a view of any dtype starts at a multiple of its item size
_LM_HEAD = "lm_head.weight"
_DERIVED_SUFFIX = "rotary_emb.inv_freq"  # old Llama checkpoints store it; it is computed, not trained


@dataclass(frozen=True)
class Manifest:
    """What a policy sends: Hugging Face names, dtypes and shapes, in this order."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Of weights that are there. Keeps none of them."""
        rows = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
        return cls(tuple(row[0] for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def bytes(self) -> int:
        """Of all together."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """Bytes of the largest."""
        return max(self.sizes)

    def info(self) -> dict[str, Any]:
        """The part of vLLM's update_info that describes the weights."""
        return {
            "names": list(self.names),
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
        }


@dataclass(frozen=True)
class WeightLayout:
    """Names and shapes that a complete set of weights has; `tied`: lm_head is the embedding and need not be sent."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    def checked(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to load: all of the layout, none besides.

        Raises:
            WeightMismatchError: as `check`.
        """
        self.check(Manifest.of(weights.items()))
        return {name: tensor for name, tensor in weights.items() if name in self.shapes}

    def check(self, manifest: Manifest) -> None:
        """See that these are all weights of the layout. Any floating dtype; vLLM casts to the engine's.

        Raises:
            WeightMismatchError: an unknown or missing name, another shape, or integers.
        """
        optional = {_LM_HEAD} if self.tied else set()
        if unknown := sorted(set(manifest.names) - set(self.shapes) - optional):
            raise WeightMismatchError(f"the model has no weight {unknown[0]!r} ({len(unknown)} unknown name(s) in the update)")
        if missing := sorted(set(self.shapes) - set(manifest.names)):
            raise WeightMismatchError(f"the update lacks weight {missing[0]!r} ({len(missing)} of {len(self.shapes)} are missing)")
        for name, dtype, found in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
            shape = self.shapes.get(name) or self.shapes["model.embed_tokens.weight"]
            if found != shape:
                raise WeightMismatchError(f"weight {name!r} has shape {found}, the model's has {shape}")
            if not dtype.is_floating_point:
                raise WeightMismatchError(f"weight {name!r} has dtype {dtype}, which is not a floating one")


def read_layout(model_path: str) -> WeightLayout:
    """The layout of a Hugging Face directory, from its config.json and the headers of its *.safetensors.

    Raises:
        FileNotFoundError: no config.json, or no *.safetensors.
    """
    directory = Path(model_path)
    tied = bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_path}: no *.safetensors, so the names of its weights are not known")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as checkpoint:
            shapes |= {name: tuple(checkpoint.get_slice(name).get_shape()) for name in checkpoint.keys()}  # noqa: SIM118
    kept = {n: s for n, s in shapes.items() if not n.endswith(_DERIVED_SUFFIX) and not (tied and n == _LM_HEAD)}
    return WeightLayout(shapes=kept, tied=tied)


class SharedWeights:
    """Tensors in an anonymous memory file (memfd) that another process of this host and user can map.

    It has no name in any file system and vanishes with the processes that hold it, however they end.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies the tensors in.

        Raises:
            OSError: not enough memory.
        """
        self._entries: list[tuple[str, str, list[int], int]] = []
        size = 0
        for name, tensor in weights.items():
            self._entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._fd = os.memfd_create("grpo-flows-weights")
        os.posix_fallocate(self._fd, 0, size)  # an error here, not a SIGBUS in the copy below
        self._size, self._path = size, f"/proc/{os.getpid()}/fd/{self._fd}"
        for name, view in open_shared(self.address()).items():
            view.copy_(weights[name])

    def address(self) -> dict[str, Any]:
        """What `open_shared` needs, in plain values. Valid until `close`."""
        return {"path": self._path, "size": self._size, "entries": self._entries}

    def close(self) -> None:
        """Drop this process's hold."""
        os.close(self._fd)


def open_shared(address: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Views of the tensors in a `SharedWeights`, of this or another process. The mapping lives as long as a view does."""
    flat = torch.from_file(address["path"], shared=True, size=address["size"], dtype=torch.uint8)
    views = {}
    for name, dtype_name, shape, offset in address["entries"]:
        dtype = getattr(torch, dtype_name)
        views[name] = flat[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return views
