"""The tests' folders are of both kinds."""

from __future__ import annotations

from tests.stores import url

__all__ = ["url"]
