"""What a checkpoint can be refused for."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or not be read. The message names the file, and says what is wrong with it."""
