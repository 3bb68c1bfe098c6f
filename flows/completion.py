"""Completion of `grpo-flows` in a shell. The scripts and what the shells want to hear are click's; the words are the commands' own.

eval "$(grpo-flows completion bash)"                                  in ~/.bashrc
eval "$(grpo-flows completion zsh)"                                   in ~/.zshrc, after compinit
grpo-flows completion fish > ~/.config/fish/completions/grpo-flows.fish
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from configs import settings
from configs.loader import recipe_names
from flows.arguments import COMMANDS, VARIABLE, Command, parse

_PATHS = {"RUN": "dir", "DIR": "dir", "PATH": "file", "MODEL": "file"}  # by metavar


def main(arguments: list[str] | None = None) -> int:
    """Print the shell's script. Returns the exit code."""
    print(_shell(parse("completion", arguments).shell).source())
    return 0


def answer() -> bool:
    """Print the words that a shell asks for. False: none asks."""
    shell, _, what = (settings.get(VARIABLE) or "").partition("_")
    if what != "complete" or get_completion_class(shell) is None:
        return False
    print(_shell(shell).complete())
    return True


def _shell(name: str) -> ShellComplete:
    found = get_completion_class(name)
    assert found is not None  # the parser's choices

    class Shell(found):  # type: ignore[misc,valid-type]  # one of three that are alike
        def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
            return completions(args, incomplete)

    made: ShellComplete = Shell(click.Group("grpo-flows"), {}, "grpo-flows", VARIABLE)
    return made


def completions(given: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """What may stand after the words `given`, the last of which is begun."""
    if not given:
        return [CompletionItem(name, help=command.help) for name, command in COMMANDS.items() if name.startswith(incomplete)]
    if (command := COMMANDS.get(given[0])) is None:
        return []
    items = _items(command, given[1:], incomplete)
    return [item for item in items if item.type != "plain" or item.value.startswith(incomplete)]


def _items(command: Command, given: Sequence[str], incomplete: str) -> list[CompletionItem]:
    actions = command.parser()._actions  # argparse has no public list of them
    before = next((action for action in actions if given and given[-1] in action.option_strings and action.nargs != 0), None)
    if before is not None:
        return _values(command, before)
    if incomplete.startswith("-"):
        return [CompletionItem(name, help=action.help) for action in actions for name in action.option_strings if name.startswith("--")]
    bare = sum(not word.startswith("-") for word in given)
    positional = [action for action in actions if not action.option_strings]
    return _values(command, positional[min(bare, len(positional) - 1)], first=bare == 0) if positional else []


def _values(command: Command, action: argparse.Action, *, first: bool = False) -> list[CompletionItem]:
    if action.choices is not None:
        return [CompletionItem(value) for value in action.choices]
    if kind := _PATHS.get(str(action.metavar)):
        return [CompletionItem("", type=kind)]
    if action.dest in ("recipe", "names") or (action.dest == "overrides" and first and command.root is not None):
        roots = [one.root for one in COMMANDS.values() if one.root is not None and command.root in (None, one.root)]
        # Files first: click's script for bash begins its list anew at them.
        return [CompletionItem("", type="file"), *(CompletionItem(name) for root in roots for name in recipe_names(root))]
    return []


if __name__ == "__main__":
    sys.exit(main())
