"""A directory of the driver's node, for actors on any node: itself where they see it too, else a copy in a cache of their node.

    driver's node                                       another node
    directory ◄── FileServer ── sizes and times ──►  at_this_node(Files) ──► that path, if it has the same files there
                       ├─────── digests ──────────►      │
                       └─────── pieces ───────────►      └──► TMPDIR/grpo-files-UID/<digest>/     held by those that use it

The cache keeps what somebody holds and the copy that came last; the digest is that of all names, sizes and SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors import names, node
from actors.space import MARGIN
from actors.storage import Content
from actors.waiting import find, wait
from configs.base import ConfigError

READERS = 4  # calls that the server answers at once
_PIECE = 16 * 2**20
_ANSWER_S = 120.0
_DIGESTED_PER_S = 20e6  # bytes, at worst
_HELD, _LOCK = ".held", "lock"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")  # of formats that nobody reads here

_held: dict[Path, int] = {}  # copies that this process uses, each with its lock: until the process ends
_here = threading.Lock()


@dataclass(frozen=True)
class Files:
    """The files in a directory of the node `home` (Ray's id), which a `FileServer` in the namespace reads out."""

    directory: str
    home: str
    namespace: str


class FileServer:
    """On the driver's node, under the name `names.FILES`. Arguments: the directories that it serves."""

    def __init__(self, *directories: str) -> None:
        self._directories = {name: Path(name) for name in directories}
        self._contents: dict[str, dict[str, Content]] = {}
        self._digesting = threading.Lock()

    def ready(self) -> str:
        """A line for the log.

        Raises:
            ConfigError: a directory is not on this node: the driver is elsewhere (ray://).
        """
        if unseen := [name for name, directory in self._directories.items() if not directory.is_dir()]:
            raise ConfigError(f"model.path: node {node.address()} of the cluster, where the run's actors stand, does not see {unseen[0]}")
        return f"for other nodes: {', '.join(self._directories)}"

    def listing(self, directory: str) -> dict[str, tuple[int, int]]:
        """Size in bytes and time of change in ns of each file directly in the directory, but weights of formats that are not read."""
        files = (path for path in sorted(self._directories[directory].iterdir()) if path.is_file() and path.suffix not in _OTHER_WEIGHTS)
        return {path.name: (found.st_size, found.st_mtime_ns) for path in files for found in [path.stat()]}

    def contents(self, directory: str) -> dict[str, Content]:
        """Size and digest of the same files."""
        with self._digesting:
            if directory not in self._contents:
                folder = self._directories[directory]
                self._contents[directory] = {name: Content.of_file(folder / name) for name in self.listing(directory)}
            return self._contents[directory]

    def read(self, directory: str, name: str, start: int, size: int) -> bytes:
        """At most `size` bytes of a file from `start` on."""
        with (self._directories[directory] / name).open("rb") as file:
            file.seek(start)
            return file.read(size)


def at_this_node(source: str | Files) -> str:
    """The path of the directory, or of a copy, on the node of this process. A copy stays until this process has ended.

    Raises:
        ConfigError: this node has no room for a copy, or its files changed on the way; names node and path.
        ActorGoneError, ActorTimeoutError: the driver's node does not answer.
    """
    if isinstance(source, str):
        return source
    if source.home == node.own_id():
        return source.directory
    remote = Remote(source.directory, find(names.FILES, source.namespace))
    return source.directory if _is_same(remote) else str(_copy(remote))


class Remote:
    """A directory of a `FileServer`, as another node asks for it.

    Attributes:
        listing: as of the server. bytes: of all these files.
    """

    def __init__(self, directory: str, server: Any) -> None:
        self.directory, self.server = directory, server
        self.listing: dict[str, tuple[int, int]] = self._ask("listing", directory)
        self.bytes = sum(size for size, _ in self.listing.values())

    def contents(self) -> dict[str, Content]:
        """As of the server."""
        found: dict[str, Content] = self._ask("contents", self.directory, seconds=_ANSWER_S + self.bytes / _DIGESTED_PER_S)
        return found

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Of a file: the next one is on its way while one is used."""
        starts = range(0, size, _PIECE)
        coming = [self.server.read.remote(self.directory, name, start, _PIECE) for start in starts[:1]]
        for start in starts:
            piece = coming.pop()
            coming += [self.server.read.remote(self.directory, name, later, _PIECE) for later in (start + _PIECE,) if later < size]
            yield wait(piece, who=names.FILES, what=f"read {self.directory}/{name}", timeout_s=_ANSWER_S)

    def _ask(self, method: str, *arguments: Any, seconds: float = _ANSWER_S) -> Any:
        return wait(getattr(self.server, method).remote(*arguments), who=names.FILES, what=method, timeout_s=seconds)


def _is_same(remote: Remote) -> bool:
    """Whether this node sees the same files under the same path: a shared disk, an image, a copy that was made before."""
    here = {name: Path(remote.directory, name) for name in remote.listing}
    if not all(path.is_file() for path in here.values()):
        return False
    found = {name: path.stat() for name, path in here.items()}
    if any(found[name].st_size != size for name, (size, _) in remote.listing.items()):
        return False
    if all(found[name].st_mtime_ns == changed for name, (_, changed) in remote.listing.items()):
        return True
    return all(Content.of_file(here[name]) == content for name, content in remote.contents().items())


def _copy(remote: Remote) -> Path:
    cache = _cache()
    with _here, _locked(cache / _LOCK):
        contents = remote.contents()
        place = cache / _digest(contents)
        if place not in _held:
            if not place.exists():
                _forget(cache)
                _fetch(remote, contents, place)
            _held[place] = _hold(place, fcntl.LOCK_SH)
    return place


def _fetch(remote: Remote, contents: Mapping[str, Content], place: Path) -> None:
    where = f"model.path: {remote.directory} is not on node {node.address()}"
    if (free := shutil.disk_usage(place.parent).free) < remote.bytes + MARGIN:
        raise ConfigError(
            f"{where}, and {place.parent} there has no room for a copy: {remote.bytes:,} bytes are needed, {free:,} are free. "
            "Put the model where all nodes see it, or start Ray there with a TMPDIR that has room"
        )
    partial = place.with_name(f".{place.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    copy_files(remote, contents, partial)
    (partial / _HELD).touch()
    partial.rename(place)


def copy_files(remote: Remote, contents: Mapping[str, Content], folder: Path) -> None:
    """Copy these files of the server's directory into a folder of this node.

    Raises:
        OSError: one cannot be written. ConfigError: it changed meanwhile. ActorGoneError, ActorTimeoutError: the server does not answer.
    """
    for name, content in contents.items():
        with (folder / name).open("wb") as file:
            for piece in remote.pieces(name, content.size):
                file.write(piece)
        if Content.of_file(folder / name) != content:
            raise ConfigError(f"{remote.directory}/{name} changed while it was copied to node {node.address()}")


def _cache() -> Path:
    """Raises: ConfigError (another user could change what is in it)."""
    cache = Path(tempfile.gettempdir()) / f"grpo-files-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if not node.is_private(cache):
        raise ConfigError(f"{cache} on node {node.address()}: other users can change what is in it: chmod 0700, in a folder with chmod +t")
    return cache


def _forget(cache: Path) -> None:
    """Remove copies that nobody holds."""
    for place in cache.iterdir():
        if place.is_dir() and (place / _HELD).is_file():
            try:
                os.close(_hold(place, fcntl.LOCK_EX))
            except BlockingIOError:
                continue
            shutil.rmtree(place)


def _hold(place: Path, how: int) -> int:
    lock = os.open(place / _HELD, os.O_RDONLY)
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this node at a time."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _digest(contents: Mapping[str, Content]) -> str:
    lines = "\n".join(f"{content.sha256} {content.size} {name}" for name, content in sorted(contents.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
