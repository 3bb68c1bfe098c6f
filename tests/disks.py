"""A disk of a few MiB: a tmpfs in a mount namespace of one command's own, gone with it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest


@cache
def _namespace() -> tuple[str, ...] | None:
    """The command that gives a mount namespace to the one that follows; None: the kernel gives none."""
    for user in ((), ("--user", "--map-root-user")):
        unshare = ("unshare", *user, "--mount")
        if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], check=False, capture_output=True).returncode == 0:
            return unshare
    return None


def with_disk(directory: Path, mib: int, command: list[str]) -> list[str]:
    """The command, which finds a disk of that size at the directory, and whose exit code and output are as without it.

    At its end the disk's files are copied into `<directory>-after`. The test is skipped where that is not possible.
    """
    unshare = _namespace()
    if unshare is None:
        pytest.skip("the kernel gives no mount namespace")
    directory.mkdir()
    script = f'mount -t tmpfs -o size={mib}m none {directory} && "$@"; code=$?; cp -a {directory} {directory}-after; exit $code'
    return [*unshare, "sh", "-c", script, "sh", *command]
