from __future__ import annotations

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
        assert (node.closed_above(folder) in {Path(top), folder.parent}) == private
        Path(top).chmod(0o700)


def test_folder_of_this_node(ray_session: None) -> None:
    assert node.is_loopback()
    folder = node.private_folder("q")
    assert node.closed_above(folder / "0") == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
