"""Names of files that come from outside (a lineage, a manifest): they may not lead out of the folder that they are joined to. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath


def inside(name: str) -> str:
    """The name, if it is a relative path in plain form that stays below its folder on any system.

    Raises:
        ValueError: it is not: empty, absolute, with `..`, `.`, a backslash, a drive letter, or a control character (NUL).
    """
    path = PurePosixPath(name)
    leads_out = not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or PureWindowsPath(name).drive
    if leads_out or str(path) != name or any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise ValueError(f"{name!r} leads out of its folder, or is no plain relative path")
    return name
