"""Directories for PREFECT_HOME in which the database has its tables: to make them takes a server longer than the rest of its start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import prefect

from configs import settings
from tests.conftest import ROOT

_MADE = ROOT / ".pytest_cache" / f"prefect-{prefect.__version__}.db"


def prefect_home(path: Path) -> Path:
    """Make such a directory of this one, which need not exist."""
    if not _MADE.exists():
        _MADE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_MADE.parent) as home:
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
            done = subprocess.run(
                command, env=settings.child_environment(PREFECT_HOME=home, PREFECT_API_URL=""), capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert not (Path(home) / "prefect.db-wal").exists()
            os.replace(Path(home) / "prefect.db", _MADE)  # whole or not at all: several processes may make it at once
    path.mkdir(parents=True, exist_ok=True)
    shutil.copy(_MADE, path / "prefect.db")
    return path
