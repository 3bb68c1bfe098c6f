"""Writes an environment's problems as {"prompt", "answer"} lines, a chat as its messages: a frozen set that no later change of a generator
touches.

python -m actors.environments.export --recipe arithmetic-cpu --split validation > frozen.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from actors.environments import Environment, Split, build
from configs.base import ConfigError
from configs.loader import load


def lines(environment: Environment, split: Split, first: int, count: int | None) -> Iterator[str]:
    """Problems `first`, `first` + 1 ... of the split, at most `count`."""
    size = environment.size(split)
    for index in range(first, size if count is None else min(size, first + count)):
        problem = environment.problem(split, index)
        prompt = problem.question if problem.messages is None else list(problem.messages)
        yield json.dumps({"prompt": prompt, "answer": problem.answer})


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m actors.environments.export", description="An environment's problems as JSON lines.")
    parser.add_argument("--recipe", default="arithmetic-cpu", help="a grpo recipe, whose environment it is (default: arithmetic-cpu)")
    parser.add_argument("--split", choices=("train", "validation"), default="validation")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem (default: 0)")
    parser.add_argument("--count", type=int, help="how many (default: all)")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="for example environment.validation_size=500")
    options = parser.parse_args(arguments)
    try:
        config = load(options.recipe, options.overrides)
        for line in lines(build(config.environment, config.seed), options.split, options.first, options.count):
            print(line)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
