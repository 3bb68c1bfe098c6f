"""Folders of both kinds: a local directory, and memory:// in place of an object store."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place."""
    return f"file://{tmp_path}/place" if request.param == "file" else memory()


def memory() -> str:
    """An empty place in memory."""
    return f"memory://{uuid.uuid4().hex}"


def put(url: str, content: str | bytes) -> None:
    """Write a file at any URL."""
    with fsspec.open(url, "wb", auto_mkdir=True) if url.startswith("file") else fsspec.open(url, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
