"""`grpo-flows`: one command for everything. It imports a command's module when that command is to run.

grpo-flows --help            grpo-flows COMMAND --help            grpo-flows run arithmetic-cpu steps=20
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from configs import settings
from configs.base import ConfigError, did_you_mean
from configs.evaluate import EvaluateConfig
from configs.loader import load
from configs.run import BaseConfig, BaseRunConfig
from flows.arguments import COMMANDS, VARIABLE, Command, parse_flow
from flows.stopping import terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command; 2 when there is no such command."""
    if settings.get(VARIABLE):  # a shell that completes
        from flows.completion import answer

        return 0 if answer() else 1
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}; {did_you_mean(name, COMMANDS, f'commands: {", ".join(COMMANDS)}')}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    if {"-h", "--help"} & set(rest):
        command.parser().print_help()
        return 0
    # As `python -m` does: rewards and environments of one's own are modules of this directory.
    sys.path.insert(0, str(Path.cwd()))
    module, _, function = command.runs.partition(":")
    try:
        with terminated(), _servers_ahead(command, rest):
            code: int = getattr(importlib.import_module(module), function)(rest)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `grpo-flows recipes | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


@contextmanager
def _servers_ahead(command: Command, arguments: Sequence[str]) -> Iterator[None]:
    """Prefect's server of a flow that is going to run starts while the block imports the flow, and so does that of its workers."""
    config = of_a_run(command, arguments)
    if config is None:
        yield
        return
    from actors.forks.server import running
    from flows.service import server
    from tasks.scratch import scratch

    joins = isinstance(config, BaseRunConfig | EvaluateConfig) and config.ray.joined
    with scratch() as place, nullcontext() if joins else running(place):  # for the servers' temporary files, too
        server.begin()
        yield


def of_a_run(command: Command, arguments: Sequence[str]) -> BaseConfig | None:
    """The configuration of the flow that is going to run, unless its data or its model is wrong. None: none will.

    Raises:
        ConfigError: the recipe or an override is wrong. It is said at once, and not after the imports of the flow.
    """
    if command.root is None:
        return None
    options = parse_flow(command.name, arguments)
    config = load(options.recipe, options.overrides, command.root)
    return None if options.check or options.dry_run else config


def usage() -> str:
    """The page of help: a line for each command."""
    lines = [f"  {command.name:<12} {command.help}" for command in COMMANDS.values()]
    return "\n".join(
        (
            "usage: grpo-flows COMMAND ...",
            "",
            "GRPO post-training of language models as Prefect flows over long-lived Ray actors.",
            "",
            *lines,
            "",
            "grpo-flows COMMAND --help says more. Completion: grpo-flows completion bash (or zsh, fish).",
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
