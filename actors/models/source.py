"""A model by its name -> its files on this machine.

    directory                           itself
    URL of a directory, or of a GGUF    a copy under ~/.cache/grpo-flows, kept by the names, sizes and times of its files
    GGUF file                           a directory beside those copies, into which it is converted once
    hub id: ORG/NAME[@REVISION]         the cache of Hugging Face; what is not there is fetched by a process of its own (hub.py)

Everything else of a run is offline (configs/settings.py): a user's own HF_HUB_OFFLINE holds for the fetch as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers

from actors.models.gguf import convert_gguf, find_gguf, gguf_config
from actors.models.hf import SUPPORTED, check_model_dir, weight_files
from actors.models.hub import IGNORED
from actors.storage import Folder
from configs import settings
from configs.base import ConfigError

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_fetched: dict[str, str] = {}  # name -> directory, of this process; whether a URL's copy is of today only the URL could say
_STAMPS = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "md5Hash", "generation")


def local_model(name: str, field: str = "model.path") -> str:
    """The directory of a model, fetched if need be.

    Args:
        field: what the recipe calls it, for messages.

    Raises:
        ConfigError: it cannot be had; says whether the hub knows it, could be reached, or lets this user in.
    """
    if (here := _here(name)) is None:
        here = _fetched[name] = _fetch_model(name, field)
    return here


def _fetch_model(name: str, field: str) -> str:
    if name.endswith(".gguf"):
        return gguf_model(name, field)
    if "://" in name:
        folder = Folder(name, field)
        names = [one for one in folder.names() if _is_wanted(one)]
        if "config.json" not in names:
            raise ConfigError(f"{field}: {name} has no config.json: give the URL of a model directory in Hugging Face format")
        return str(_copied(folder, names))
    if not is_hub_id(name):
        return name  # the preflight says what is wrong with it
    config = _fetch(name, ("config.json",), field) / "config.json"
    kind = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    if kind not in SUPPORTED:  # before gigabytes are fetched
        raise ConfigError(f"{field}: {name} of the hub is of type {kind!r}; supported are dense {', '.join(SUPPORTED)}")
    return str(_fetch(name, _FILES, field))


def known_model(name: str, field: str = "model.path") -> str:
    """As `local_model`, with what this machine has, or what this process has fetched.

    Raises:
        ConfigError: it would have to be fetched.
    """
    here = _here(name) or _fetched.get(name)
    if here is None and ("://" in name or name.endswith(".gguf") or is_hub_id(name)):
        raise ConfigError(f"{field}: {name} is not on this machine yet; the run fetches it at its start")
    return here or name


def gguf_model(source: str, field: str = "model.gguf") -> str:
    """The directory into which a GGUF file is converted: that of an earlier time, when the file has not changed.

    Args:
        source: a file, its URL, or a package with one. field: what the recipe calls it, for messages.

    Raises:
        ConfigError: there is no such file or package, it cannot be reached, or transformers cannot read it.
    """
    file = _local_gguf(source, field)
    return str(_cached(_stamps_of(file), lambda directory: convert_gguf(file, directory, field)))


def known_gguf(source: str) -> Any:
    """The configuration of transformers: of an earlier conversion, or by the file's header.

    Raises:
        ConfigError: as `gguf_model`.
    """
    file = _local_gguf(source, "model.gguf")
    converted = _cache(_stamps_of(file))
    return check_model_dir(str(converted)) if converted.is_dir() else gguf_config(file)


def _local_gguf(source: str, field: str) -> Path:
    """A GGUF file on this machine."""
    if "://" not in source:
        return find_gguf(source, field).resolve()
    url, _, name = source.rpartition("/")
    folder = Folder(url, field)
    if folder.info(name) is None:
        raise ConfigError(f"{field}: there is no file {source}")
    return _copied(folder, [name]) / name


def is_hub_id(name: str) -> bool:
    """Whether it may be the id of a model; a relative path of two parts may be one as well."""
    return _HUB_ID.fullmatch(name) is not None


def _here(name: str) -> str | None:
    """The directory, when nothing needs to be fetched."""
    if Path(name).is_dir():
        return name
    if not is_hub_id(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    repo, _, revision = name.partition("@")
    with suppress(OSError, ValueError, HFValidationError, IncompleteSnapshotError):  # ConfigError is a ValueError: weights are missing
        allowed, ignored = list(_FILES), list(IGNORED)
        found = snapshot_download(repo, revision=revision or None, local_files_only=True, allow_patterns=allowed, ignore_patterns=ignored)
        weight_files(Path(found))
        return found
    return None


def _fetch(name: str, patterns: Sequence[str], field: str) -> Path:
    repo, _, revision = name.partition("@")
    switches = settings.lifted("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    path = settings.python_path(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "actors.models.hub", repo, revision, *patterns],
        env=settings.child_environment(PYTHONPATH=path, **switches), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip  # its progress goes to the terminal
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(f"{field}: {name} could not be fetched from the hub: the process ended with code {done.returncode}") from None
    if "path" in said:
        return Path(said["path"])
    offline = settings.get("HF_HUB_OFFLINE") if not switches else None
    why = {
        "unknown": f"the hub has no model {repo} (or a private one: log in with `hf auth login`, or set HF_TOKEN)",
        "gated": f"{repo} of the hub is gated: accept its terms there, and log in with `hf auth login`, or set HF_TOKEN",
        "revision": f"{repo} of the hub has no revision {revision!r}",
        "unreachable": "HF_HUB_OFFLINE is set: unset it" if offline else f"the hub could not be asked for it ({_line(said['error'])})",
    }.get(said["kind"], f"the hub: {_line(said['error'])}")
    raise ConfigError(
        f"{field}: there is no directory {name}, nor is it in the cache of Hugging Face, and {why}. Without a network, give a directory, "
        f"or run `hf download {repo}` elsewhere and copy its cache"
    )


def _is_wanted(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in _FILES) and not any(fnmatch(file, pattern) for pattern in IGNORED)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _copied(folder: Folder, names: Sequence[str]) -> Path:
    """The files on this machine: those of an earlier copy, when nothing about them has changed."""
    stamps = {name: {key: str(value) for key, value in (folder.info(name) or {}).items() if key in _STAMPS} for name in names}

    def copy(directory: Path) -> None:
        for name in names:
            folder.get(name, directory / name)

    return _cached([folder.url, stamps], copy)


def _stamps_of(file: Path) -> list[object]:
    """What a conversion depends on."""
    about = file.stat()
    return [str(file), about.st_size, about.st_mtime_ns, transformers.__version__]


def _cached(stamps: object, fill: Callable[[Path], object]) -> Path:
    """The directory that was once filled for these stamps (JSON); it appears when it is whole."""
    target = _cache(stamps)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(partial)
        with suppress(OSError):  # another run was quicker
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _cache(stamps: object) -> Path:
    """Where `_cached` puts it."""
    digest = hashlib.sha256(json.dumps(stamps, sort_keys=True).encode()).hexdigest()[:32]
    return Path(settings.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-flows" / "models" / digest
