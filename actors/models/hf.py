"""A Hugging Face model directory: what it must hold, the shape that its config.json states, and writing one. Imports no Megatron."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from actors.storage import reason
from configs.base import ConfigError
from configs.policy import ParallelConfig

_POINTER = b"version https://git-lfs.github.com/spec/"
SUPPORTED = ("llama", "qwen2", "qwen3")
# Megatron's rope scaling has these three of Llama 3.1 built in; only the factor can be set.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def check_model_dir(path: str) -> Any:
    """The transformers configuration of a directory that can be trained.

    Raises:
        ConfigError: what the directory lacks, or what in it is not supported, and what to do.
    """
    from transformers import AutoConfig  # a second; not every process that reads the headers needs it

    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"model.path: there is no directory {path}")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path: {path} has no config.json: give a model directory in Hugging Face format")
    for file in sorted(directory.iterdir()):
        if is_pointer(file):
            raise ConfigError(f"model.path: {file} is a git-lfs pointer and not the file itself: run `git lfs pull` where it is from")
    with open_weights(path):
        pass  # their headers are whole
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # each model's configuration in transformers has checks, and exceptions, of its own
        raise ConfigError(f"model.path: {path}/config.json cannot be read: {reason(error)}") from error
    if config.model_type not in SUPPORTED:
        raise ConfigError(f"model.path: {path} is of type {config.model_type!r}; supported are dense {', '.join(SUPPORTED)}")
    for flag, what in (
        ("attention_bias", "a bias on the attention output"),
        ("mlp_bias", "a bias in the MLP"),
        ("use_sliding_window", "sliding-window attention"),
    ):
        if getattr(config, flag, False):
            raise ConfigError(f"model.path: {path}/config.json sets {flag}: {what} is not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model.path: {path}/config.json has a quantization_config: give the unquantised model")
    if config.hidden_act != "silu":
        raise ConfigError(f"model.path: {path}/config.json has hidden_act {config.hidden_act!r}; supported is 'silu'")
    rope_scaling_factor(config)
    return config


def check_teacher_dir(path: str, source: str = "") -> Any:
    """As `check_model_dir`, of the directory that policy.teacher has for a source; "": for all others."""
    try:
        return check_model_dir(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", teacher_field(source))) from None


def teacher_field(source: str) -> str:
    """The setting that names the teacher of a source."""
    return f"policy.teacher.sources.{source}" if source else "policy.teacher.path"


def is_pointer(file: Path) -> bool:
    """Whether git-lfs has left a few lines in place of the file."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


class _Index(BaseModel):
    weight_map: dict[str, str]


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the weights: those that the index names, else model.safetensors.

    Other safetensors files (a consolidated copy, an adapter) are left alone, as transformers does; but see `check_engine_reads`.

    Raises:
        ConfigError: there are none, one that the index names is missing, or the index is damaged.
    """
    index = directory / "model.safetensors.index.json"
    try:
        named = _Index.model_validate_json(index.read_bytes()).weight_map.values() if index.is_file() else ["model.safetensors"]
    except ValidationError as error:
        raise ConfigError(f"model.path: {index} is no index of weights: {error.errors()[0]['msg']}") from None
    names = sorted(set(named))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(
            f"model.path: {directory} has no weights: {missing[0]} is missing; model.safetensors (or model.safetensors.index.json "
            "with all its parts) is needed, which save_pretrained writes"
        )
    return [directory / name for name in names]


def check_engine_reads(path: str) -> None:
    """vLLM takes the same weights from the directory as the policy: without an index it loads every safetensors file that it finds there.

    Raises:
        ConfigError: there are others, and no index.
    """
    directory = Path(path)
    others = sorted(file.name for file in directory.glob("*.safetensors") if file.name != "model.safetensors")
    if others and not (directory / "model.safetensors.index.json").is_file():
        raise ConfigError(
            f"model.path: {path} has {others[0]} beside model.safetensors, and vLLM would load both: move it out of the directory "
            f"({len(others)} such file(s))"
        )


@contextmanager
def open_weights(path: str) -> Iterator[dict[str, Any]]:
    """For each weight of the directory, by name, the `safe_open` file that holds it.

    Raises:
        ConfigError: as `weight_files`, or a file is damaged.
    """
    with ExitStack() as stack:
        files = []
        for file in weight_files(Path(path)):
            try:
                files.append(stack.enter_context(safe_open(file, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"model.path: {file} cannot be read: {reason(error)}") from error
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118  (not a dict)


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of the directory by name, read from the headers of its files.

    Raises:
        ConfigError: as `weight_files`.
    """
    with open_weights(path) as files:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}


def parameter_count(path: str) -> int:
    """Parameters of the directory's weights. Raises: as `tensor_shapes`."""
    return sum(math.prod(shape) for shape in tensor_shapes(path).values())


def save_model_dir(directory: Path, source: Path, weights: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Write weights under their Hugging Face names, with the configuration and tokenizer of the model directory `source`."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix in {".json", ".txt", ".jinja", ".model"} and ".safetensors" not in file.name:
            shutil.copyfile(file, directory / file.name)
    shape = json.loads((directory / "config.json").read_text())
    shape.pop("torch_dtype", None)  # the old name of the same field
    (directory / "config.json").write_text(json.dumps(shape | {"dtype": dtype}, indent=2) + "\n")
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})


def rope_scaling_factor(config: Any) -> float | None:
    """Llama 3.1's rope scaling factor, or None for plain rotary embeddings.

    Raises:
        ConfigError: another kind of scaling.
    """
    rope = config.rope_parameters
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind == "default":
        return None
    if kind == "llama3" and all(rope.get(name) == value for name, value in _LLAMA3_ROPE.items()) and isinstance(factor, int | float):
        return float(factor)
    raise ConfigError(f"model.path: rope scaling {rope} is not supported; plain rotary embeddings and Llama 3.1's scaling are")


def head_dim(config: Any) -> int:
    """Size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_layout(parallel: ParallelConfig, shape: Any) -> None:
    """The parallel layout divides the model.

    Raises:
        ConfigError: it does not; names the field.
    """
    for name, total, parts in (
        ("num_attention_heads", shape.num_attention_heads, parallel.tensor),
        ("num_key_value_heads", shape.num_key_value_heads, parallel.tensor),
        ("intermediate_size", shape.intermediate_size, parallel.tensor),
        ("num_hidden_layers", shape.num_hidden_layers, parallel.pipeline),
    ):
        if total % parts:
            field = "pipeline" if "layers" in name else "tensor"
            raise ConfigError(f"policy.parallel.{field}: {parts} does not divide the model's {name} ({total})")
