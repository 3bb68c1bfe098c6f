"""Small files in a folder behind an fsspec URL, written as a whole or not at all.

create    local: temporary file, then a hard link    object store: one conditional put       False if the name is taken
replace   local: temporary file, then a rename       object store: one put
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from configs.base import ConfigError


class RegistryError(RuntimeError):
    """What this package refuses to do, and why; the subclasses say in which case."""


@contextmanager
def reaching(field: str, url: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes one line that names the field and the URL.

    Raises:
        ConfigError.
    """
    try:
        yield
    except (ConfigError, RegistryError):
        raise
    except Exception as error:  # every store behind fsspec has exceptions of its own
        why = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(f"{field}: cannot reach {url}: {type(error).__name__}: {why}") from error


class Folder:
    """One folder. It need not exist before the first write.

    Args:
        field: what the recipe calls the URL, for messages.

    Raises:
        ConfigError: no such kind of URL, or its client is not installed.
    """

    def __init__(self, url: str, field: str) -> None:
        self.url, self.field = url.rstrip("/"), field
        with reaching(field, url):
            self.fs, root = fsspec.core.url_to_fs(url)
        self.root = str(root).rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """The path of a name, as `fs` takes it."""
        return f"{self.root}/{name}"

    def names(self, name: str = "", *, below: bool = False) -> list[str]:
        """Files (and folders) directly in the folder `name`; or all files `below` it, with their folders in their names. Sorted."""
        path = self.path(name) if name else self.root
        self.fs.invalidate_cache()  # others write here as well
        try:
            found: list[str] = self.fs.find(path) if below else self.fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(one).rstrip("/")[len(path) + 1 :] for one in found)

    def read(self, name: str) -> bytes | None:
        """The content, or None when there is no such file."""
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        return content

    def create(self, name: str, content: bytes) -> bool:
        """Write a new file. False: somebody else's file of that name is there. The content must be this writer's alone (a nonce, say)."""
        if self.local:
            with self._temporary(name, content) as temporary:
                try:
                    os.link(temporary, self.path(name))
                except FileExistsError:
                    return False
            _sync(Path(self.path(name)).parent)
            return True
        try:
            self.fs.pipe_file(self.path(name), content, mode="create")
        except OSError:
            # The name was taken; or our put went through and its answer was lost.
            found = self.read(name)
            if found is None:
                raise
            return found == content
        return True

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in place of the one that may be there. A reader sees the old or the new content."""
        if self.local:
            with self._temporary(name, content) as temporary:
                os.replace(temporary, self.path(name))
            _sync(Path(self.path(name)).parent)
        else:
            self.fs.pipe_file(self.path(name), content)

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all it holds. No error when it is not there."""
        try:
            self.fs.rm(self.path(name), recursive=True)
        except FileNotFoundError:
            return

    def put(self, source: Path, name: str) -> None:
        """Copy a large local file into the folder. Readers can see it half-written: tell them its name only afterwards."""
        target = self.path(name)
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(source), target)
        if self.local:
            _sync(Path(target))

    @contextmanager
    def _temporary(self, name: str, content: bytes) -> Iterator[Path]:
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            temporary.write_bytes(content)
            _sync(temporary)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    # Else a power cut may leave the name and lose the content.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
