"""Files in a folder behind an fsspec URL: small ones written as a whole or not at all, large ones told by their digests.

create    local: temporary file, then a hard link    object store: one conditional put       False if the name is taken
replace   local: temporary file, then a rename       object store: one put
put       a copy of a large file, with its size and SHA-256
fetched   large files on this machine's disk, each with the size and the SHA-256 that it must have
"""

from __future__ import annotations

import functools
import hashlib
import os
import queue
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel

from configs.base import ConfigError
from configs.redaction import redacted
from configs.secrets import resolve

_TWINS = ("s3fs", "gcsfs")  # each release wants fsspec of its own version


class DamagedError(RuntimeError):
    """A file is missing, or is not the one that was written. The message names it."""


class Content(BaseModel, frozen=True, extra="forbid"):
    """What identifies the content of a file: `size` in bytes, and SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Content:
        """Of these bytes."""
        return cls(size=len(content), sha256=hashlib.sha256(content).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> Content:
        """Of a local file, which may be large."""
        with path.open("rb") as file:
            return cls(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def reason(error: Exception) -> str:
    """In one line, why storage cannot be used; of a client that is not installed, the command that installs it."""
    cause = error.__cause__
    if isinstance(error, ImportError) and isinstance(cause, ModuleNotFoundError) and cause.name:
        package = f"{cause.name}=={fsspec.__version__}" if cause.name in _TWINS else cause.name
        return f"the package {cause.name} is not installed: pip install {package}"
    return f"{type(error).__name__}: {redacted(' '.join(str(error).split())) or 'no reason given'}"


def harmless(error: Exception) -> Exception | None:
    """The error as a cause to show; None: a client's message may have the URL as it was asked, password and all."""
    return error if redacted(str(error)) == str(error) else None


def _reaches[**P, R](method: Callable[Concatenate[Folder, P], R]) -> Callable[Concatenate[Folder, P], R]:
    """What goes wrong in the method becomes one line that names the field and the URL: a ConfigError."""

    @functools.wraps(method)
    def guarded(self: Folder, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if self.timeout_s is None:
                return method(self, *args, **kwargs)
            return _within(self.timeout_s, lambda: method(self, *args, **kwargs))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  (every store behind fsspec has exceptions of its own)
            raise ConfigError(f"{self.field}: cannot reach {self.url}: {reason(error)}") from harmless(error)

    return guarded


def _within[R](timeout_s: float, call: Callable[[], R]) -> R:
    # Not every store's client has a deadline. A call that is stuck keeps its thread, which does not keep the process.
    answers: queue.SimpleQueue[tuple[R | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            answers.put((None, error))

    threading.Thread(target=run, name="storage", daemon=True).start()
    try:
        value, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class Folder:
    """One folder. It need not exist before the first write.

    Args:
        field: name of the URL in the recipe, for messages.
        timeout_s: longest wait for one file; None: as the store's client has it.

    Raises:
        ConfigError: no such kind of URL, or its client is not installed. Every method raises it when the store cannot be reached.
    """

    def __init__(self, url: str, field: str, timeout_s: float | None = None) -> None:
        self.url, self.field, self.timeout_s = url.rstrip("/"), field, timeout_s
        self._connect()

    @_reaches
    def _connect(self) -> None:
        self.fs, root = fsspec.core.url_to_fs(resolve(self.url, self.field))
        self.root = str(root).rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """The path of a name, as `fs` takes it."""
        return f"{self.root}/{name}" if name else self.root

    @_reaches
    def info(self, name: str = "") -> dict[str, Any] | None:
        """`type` ("file" or "directory") and `size` in bytes of what is there; None: nothing is."""
        self.fs.invalidate_cache()  # others write here as well
        with suppress(FileNotFoundError):
            return dict(self.fs.info(self.path(name)))  # not `exists`, which is False as well when the store cannot be reached
        return None

    @_reaches
    def names(self, name: str = "", *, below: bool = False) -> list[str]:
        """Files (and folders) directly in the folder `name`; or all files `below` it, with their folders in their names. Sorted."""
        path = self.path(name)
        self.fs.invalidate_cache()
        found: list[str] = []
        with suppress(FileNotFoundError):
            found = self.fs.find(path) if below else self.fs.ls(path, detail=False)
        names = (str(one).rstrip("/")[len(path) + 1 :] for one in found)
        return sorted(filter(None, names))  # S3's console makes a folder by an empty object with the folder's own name

    def numbers(self, name: str = "") -> list[int]:
        """The numbers of the `numbered` files in the folder `name`, ascending."""
        stems = (one.removesuffix(".json") for one in self.names(name))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def last(self, name: str = "") -> int:
        """The highest of these numbers; 0: there is none."""
        return max(self.numbers(name), default=0)

    @_reaches
    def read(self, name: str = "") -> bytes | None:
        """The content (without a name: of the file at the URL itself), or None when there is no such file."""
        with suppress(FileNotFoundError):
            return bytes(self.fs.cat_file(self.path(name)))
        return None

    @_reaches
    def create(self, name: str, content: bytes) -> bool:
        """Write a new file. False: somebody else's file of that name is there. The content must be this writer's alone (a nonce, say)."""
        try:
            if self.local:
                self._write(name, content, os.link)
            else:
                self.fs.pipe_file(self.path(name), content, mode="create")
        except Exception:
            # The name was taken; or the file was stored and the store's answer was lost. Every store has exceptions of its own.
            found = self.read(name)
            if found is None:
                raise
            return found == content
        return True

    @_reaches
    def replace(self, name: str, content: bytes) -> None:
        """Write a file in place of the one that may be there. A reader sees the old or the new content."""
        if self.local:
            self._write(name, content, os.replace)
        else:
            self.fs.pipe_file(self.path(name), content)

    @_reaches
    def remove(self, name: str) -> None:
        """Remove a file or a folder with all it holds. No error when it is not there."""
        with suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)

    @_reaches
    def put(self, source: Path, name: str) -> Content:
        """Copy a large local file into the folder. Readers can see it half-written: tell them its name only afterwards."""
        target, content = self.path(name), Content.of_file(source)
        if self.local:  # elsewhere fsspec does it where folders exist; of an object store it would make the bucket, however mistyped
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(source), target)
        if self.local:
            _sync(Path(target))
        return content

    def sync(self, directory: Path) -> None:
        """A local directory and all its files are on the disk when this returns."""
        for path in (*directory.rglob("*"), directory):
            _sync(path)

    @contextmanager
    def fetched(self, files: Mapping[str, Content]) -> Iterator[Path]:
        """These files, in a directory of this machine: the folder itself if it is local, else a temporary copy.

        Raises:
            DamagedError: one is missing, or has another size or digest.
        """
        if self.local:
            self._check(Path(self.root), files)
            yield Path(self.root)
            return
        copy = Path(tempfile.mkdtemp(prefix="grpo-fetched-"))
        try:
            for name in files:
                if self.info(name) is not None:
                    self.get(name, copy / name)
            self._check(copy, files)
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _check(self, root: Path, files: Mapping[str, Content]) -> None:
        for name, wanted in files.items():
            where = f"{self.url}/{name}"
            if not (root / name).is_file():
                raise DamagedError(f"{where} is missing")
            if (size := (root / name).stat().st_size) != wanted.size:
                raise DamagedError(f"{where} has {size} bytes, {wanted.size} were written: it was cut off or changed")
            if Content.of_file(root / name) != wanted:
                raise DamagedError(f"{where} was changed after it was written: its SHA-256 is another")

    @_reaches
    def get(self, name: str, target: Path) -> None:
        """Copy a file from the folder to a local path."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(self.path(name), str(target))

    def _write(self, name: str, content: bytes, publish: Callable[[Path, Path], None]) -> None:
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            temporary.write_bytes(content)
            _sync(temporary)
            publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(target.parent)


def numbered(number: int) -> str:
    """The name of file `number` in a folder of numbered ones."""
    return f"{number:06d}.json"


def _sync(path: Path) -> None:
    # Else a power cut may leave the name and lose the content.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
