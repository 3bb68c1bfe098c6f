"""Checkpoints of a run: what one consists of, and where they are kept."""
