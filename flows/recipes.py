"""The recipes that come with the package, for a person who looks for one to begin with.

grpo-flows recipes                                            each with the first sentence of its file
grpo-flows recipes show arithmetic-cpu                        the file; with --resolved every setting, defaults too
grpo-flows recipes diff arithmetic-cpu arithmetic-cpu-async   what differs, defaults and presets resolved
grpo-flows recipes diff arithmetic-cpu my-model.yaml mode=async
"""

from __future__ import annotations

import argparse
import sys

from configs.base import ConfigError
from configs.continuity import flat
from configs.loader import dump, load_any, path_of, recipe_names
from configs.run import BaseConfig
from flows.arguments import COMMANDS, parse


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input."""
    options = parse("recipes", arguments)
    try:
        print({"list": _list, "show": _show, "diff": _diff}[options.what](options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _list(options: argparse.Namespace) -> str:
    _names(options, 0)
    lines = []
    for command in COMMANDS.values():
        if command.root is not None:
            lines += [f"grpo-flows {command.name} ..."]
            lines += [f"  {name:<26} {_first_sentence(name)}" for name in recipe_names(command.root)]
    return "\n".join(lines)


def _show(options: argparse.Namespace) -> str:
    (name,), overrides = _names(options, 1)
    if options.resolved or overrides:
        return dump(load_any(name, overrides)).rstrip()
    load_any(name)
    return path_of(name).read_text().rstrip()


def _diff(options: argparse.Namespace) -> str:
    (one, other), overrides = _names(options, 2)
    return "\n".join(differences(load_any(one), load_any(other, overrides))) or "no setting differs"


def differences(one: BaseConfig, other: BaseConfig) -> list[str]:
    """`field: one -> other` of every setting that differs, in the order of the configuration."""
    first, second = flat(one.model_dump(mode="json")), flat(other.model_dump(mode="json"))
    names = (name for name in dict.fromkeys((*first, *second)) if first.get(name) != second.get(name))
    return [f"{name}: {first.get(name, 'unset')} -> {second.get(name, 'unset')}" for name in names]


def _names(options: argparse.Namespace, count: int) -> tuple[list[str], list[str]]:
    """The recipes that are named, and what goes on top."""
    names = [word for word in options.names if "=" not in word]
    if len(names) != count:
        wanted = {0: "takes no recipe", 1: "takes one recipe", 2: "takes two recipes"}[count]
        raise ConfigError(f"recipes {options.what} {wanted}, not {len(names)}")
    return names, [word for word in options.names if "=" in word]


def _first_sentence(name: str) -> str:
    """Of the comment at the file's head."""
    head = []
    for line in path_of(name).read_text().splitlines():
        if not line.startswith("#"):
            break
        head.append(line.removeprefix("#").strip())
    return " ".join(head).partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    raise SystemExit(main())
