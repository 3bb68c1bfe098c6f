"""Which weights an update consists of: names, dtypes and shapes; and the check that they are all the weights of the engine's model.

Names are those of the Hugging Face checkpoint that the engine was started from. Does not import vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from actors.models.hf import tensor_shapes

_LM_HEAD = "lm_head.weight"
_DERIVED_SUFFIX = "rotary_emb.inv_freq"  # old Llama checkpoints store it; it is computed, not trained


class WeightMismatchError(ValueError):
    """The weights of an update do not fit the model. The message names the tensor; the engine keeps the weights it had."""


@dataclass(frozen=True)
class Manifest:
    """Names, dtypes and shapes of the weights that a policy sends, in their order."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """The manifest of these weights; keeps no tensor."""
        rows = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
        return cls(tuple(row[0] for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each weight."""
        return [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """Bytes of the largest weight."""
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
    """Names and shapes of a complete set of weights.

    Attributes:
        tied: whether lm_head is the embedding, and need not be sent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    def checked(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the layout, without a tied lm_head.

        Raises:
            WeightMismatchError: as `check`.
        """
        self.check(Manifest.of(weights.items()))
        return {name: tensor for name, tensor in weights.items() if name in self.shapes}

    def check(self, manifest: Manifest) -> None:
        """Check that the manifest has every weight of the layout, in any floating dtype: vLLM casts to the engine's.

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
    """The layout of a Hugging Face directory, from its config.json and the headers of its weight files.

    Raises:
        FileNotFoundError: no config.json. ConfigError: no weights.
    """
    tied = bool(json.loads((Path(model_path) / "config.json").read_text()).get("tie_word_embeddings", False))
    shapes = tensor_shapes(model_path)
    kept = {n: s for n, s in shapes.items() if not n.endswith(_DERIVED_SUFFIX) and not (tied and n == _LM_HEAD)}
    return WeightLayout(shapes=kept, tied=tied)
