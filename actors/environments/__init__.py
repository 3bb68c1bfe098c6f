"""Prompts and rewards: `build(config)` gives the environment that a recipe names."""

from actors.environments.base import Environment, Problem, Split
from actors.environments.registry import build

__all__ = ["Environment", "Problem", "Split", "build"]
