"""Files of another node: what is taken for the same, what is copied, and what stays of copies. Over Ray: tests/e2e/test_nodes.py."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors import files
from actors.files import FileServer
from configs.base import ConfigError


class Direct(files.Remote):
    """Asks a server of this process."""

    def __init__(self, directory: Path, server: FileServer) -> None:
        self.directory, self._direct = str(directory), server
        self.listing = server.listing(self.directory)
        self.bytes = sum(size for size, _ in self.listing.values())

    def contents(self) -> Any:
        return self._direct.contents(self.directory)

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        yield from (self._direct.read(self.directory, name, start, 7) for start in range(0, size, 7))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / "model" / name).write_bytes(name.encode() * 9)
    return tmp_path / "model"


@pytest.fixture
def cache(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a node of the test's own; nobody holds anything in it."""
    monkeypatch.setattr(files, "_held", {})
    return temporary / f"grpo-files-{os.getuid()}"


def served(model: Path) -> Direct:
    return Direct(model, FileServer(str(model)))


def elsewhere(model: Path) -> Direct:
    """The server's directory, as it was; on this node there is nothing under its name any more."""
    found = served(model)
    moved = model.with_name("moved")
    shutil.copytree(model, moved, dirs_exist_ok=True)
    found._direct._directories[str(model)] = moved
    shutil.rmtree(model)
    return found


def test_the_same_path_with_the_same_files_is_used_as_it_is(model: Path) -> None:
    remote = served(model)
    assert files._is_same(remote)
    os.utime(model / "config.json")  # copied by hand: another time, the same content
    assert files._is_same(remote)
    (model / "config.json").write_bytes(b"x" * 99)
    assert not files._is_same(remote)


def test_another_size_or_a_missing_file_is_another_model(model: Path) -> None:
    remote = served(model)
    (model / "model.safetensors").write_bytes(b"longer" * 99)
    assert not files._is_same(remote)
    (model / "model.safetensors").unlink()
    assert not files._is_same(remote)


def test_a_copy_has_what_is_read_of_a_model(model: Path, cache: Path) -> None:
    remote = elsewhere(model)
    assert not files._is_same(remote)
    copy = files._copy(remote)
    assert copy.parent == cache
    assert cache.stat().st_mode & 0o077 == 0
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.name != ".held"} == {
        name: name.encode() * 9 for name in ("config.json", "model.safetensors")
    }
    assert files._copy(remote) == copy


def test_copies_go_when_nobody_holds_them_and_another_comes(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = elsewhere(model)
    first = files._copy(remote)
    (model.with_name("moved") / "config.json").write_bytes(b"another")
    second = files._copy(_again(remote))
    assert first.exists()
    assert second != first
    for lock in files._held.values():
        os.close(lock)
    monkeypatch.setattr(files, "_held", {})
    (model.with_name("moved") / "config.json").write_bytes(b"a third")
    third = files._copy(_again(remote))
    assert {path for path in cache.iterdir() if path.is_dir()} == {third}


def test_a_copy_that_a_killed_process_began_is_begun_anew(model: Path, cache: Path) -> None:
    remote = elsewhere(model)
    name = files._digest(remote.contents())
    (cache / f".{name}").mkdir(parents=True)
    cache.chmod(0o700)
    (cache / f".{name}" / "half").touch()
    assert not (files._copy(remote) / "half").exists()


def test_a_node_without_room_is_named(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = elsewhere(model)
    monkeypatch.setattr(files, "MARGIN", 2**62)
    with pytest.raises(ConfigError, match=rf"model.path: {model} is not on node 127.0.0.1, and {cache} there has no room for a copy"):
        files._copy(remote)


def test_a_file_that_changes_on_its_way_is_no_copy(model: Path, cache: Path) -> None:
    remote = elsewhere(model)
    remote.contents()
    (model.with_name("moved") / "config.json").write_bytes(b"config.jsoN" * 9)
    with pytest.raises(ConfigError, match=r"config\.json changed while it was copied"):
        files._copy(remote)
    assert [path for path in cache.iterdir() if not path.name.startswith(".") and path.is_dir()] == []


def test_a_cache_that_others_can_change_is_not_used(model: Path, cache: Path) -> None:
    remote = elsewhere(model)
    cache.mkdir()
    cache.chmod(0o777)
    cache.parent.chmod(0o1777)
    with pytest.raises(ConfigError, match="other users can change"):
        files._copy(remote)


def test_a_held_copy_is_locked_for_all_processes(model: Path, cache: Path) -> None:
    copy = files._copy(elsewhere(model))
    with (copy / ".held").open() as held, pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert tempfile.gettempdir() == str(cache.parent)


def _again(remote: Direct) -> Direct:
    """The same server, started anew."""
    server = FileServer(remote.directory)
    server._directories = remote._direct._directories
    return Direct(Path(remote.directory), server)
