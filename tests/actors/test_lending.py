"""Folders that stand for a directory on nodes that do not see it. Over several nodes: tests/e2e/test_nodes.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import ray

from actors import lending, node
from actors.waiting import ActorGoneError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.fixture
def folder(ray_session: None, tmp_path: Path) -> Path:
    """Of a node that does not see the directory: this one."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def test_this_node_has_the_directory_itself(ray_session: None, directory: Path) -> None:
    here = node.own_id()
    assert lending.lend(directory, [here, here]) == {here: str(directory)}
    assert not directory.exists(), "nothing is asked, and nothing made"


def test_a_node_that_sees_the_directory_has_it_too(ray_session: None, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = node.own_id()
    monkeypatch.setattr(node, "own_id", lambda: "the group's")
    assert lending.lend(directory, [here]) == {here: str(directory)}
    assert list(directory.iterdir()) == []


def test_one_that_does_not_gets_a_folder_of_its_own(directory: Path) -> None:
    directory.mkdir()
    token = directory / ".seen"
    token.touch()
    assert lending._place(str(token)) is None
    token.unlink()
    folder = Path(str(lending._place(str(token))))
    assert folder.parent == Path(tempfile.gettempdir())
    assert folder.stat().st_mode & 0o077 == 0
    lending._remove(str(folder))
    assert not folder.exists()


def test_what_is_written_comes_and_what_is_read_goes(directory: Path, folder: Path) -> None:
    directory.mkdir()
    lent = {node.own_id(): str(folder)}
    (folder / "__0_0.distcp").write_bytes(b"weights" * 3_000_000)  # more than one piece
    (folder / ".metadata").write_bytes(b"")
    (directory / "index").write_bytes(b"of the run")
    lending.collect(lent, directory)
    assert (directory / "__0_0.distcp").read_bytes() == b"weights" * 3_000_000
    assert sorted(path.name for path in directory.iterdir()) == [".metadata", "__0_0.distcp", "index"]
    (folder / "__0_0.distcp").unlink()
    lending.deliver(directory, lent)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {path.name: path.read_bytes() for path in directory.iterdir()}
    lending.take_back(lent, directory)
    assert not folder.exists()
    assert directory.exists()


def test_the_directory_itself_is_never_taken_back(ray_session: None, directory: Path) -> None:
    directory.mkdir()
    lending.take_back({node.own_id(): str(directory)}, directory)
    assert directory.exists()


def test_a_node_that_is_gone(ray_session: None, directory: Path, folder: Path) -> None:
    gone = {ray.NodeID.from_random().hex(): str(folder)}
    with pytest.raises(ActorGoneError):
        lending.lend(directory, gone)
    directory.mkdir(exist_ok=True)
    with pytest.raises(ActorGoneError):
        lending.deliver(directory, gone)
    with pytest.raises(ActorGoneError):
        lending.collect(gone, directory)
    lending.take_back(gone, directory)
