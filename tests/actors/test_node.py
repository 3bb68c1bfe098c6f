from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from actors import node


@pytest.mark.parametrize(
    ("above", "own", "private"),
    [
        (0o755, 0o700, True),
        (0o755, 0o755, False),  # others read it
        (0o755, 0o710, False),
        (0o777, 0o700, False),  # others put a folder of theirs in its place
        (0o775, 0o700, False),
        (0o1777, 0o700, True),  # as /tmp
        (0o700, 0o777, True),  # nobody gets that far
    ],
)
def test_private(above: int, own: int, private: bool) -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "own/below")
        folder.mkdir(parents=True)
        folder.parent.chmod(own)
        Path(top).chmod(above)
        assert node.is_private(folder) == private
        Path(top).chmod(0o700)


@pytest.mark.parametrize(("mode", "fits"), [(0o700, True), (0o777, False)])
def test_folder(mode: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary).chmod(mode)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        folder = node.private_folder("q")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == Path(temporary if fits else "/tmp")
        assert os.listdir(temporary) == ([folder.name] if fits else [])
        folder.rmdir()


def test_paths_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = node.private_folder("q")
    assert folder.parent == Path("/tmp")
    folder.rmdir()


def test_without_a_cluster_this_machine_is_alone() -> None:
    assert node.address() == "127.0.0.1"
