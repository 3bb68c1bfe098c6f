"""The command line of a flow: configuration first, then a Prefect server where none is configured, then the flow."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.checkpoints.errors import CheckpointError
from actors.environments.hosted import UserEnvironmentError
from actors.models.memory_plan import gpu_capacity, render
from actors.preflight import check_memory, planned_memory
from configs.base import ConfigError
from configs.loader import dump, load, located
from configs.run import BaseConfig, BaseRunConfig
from flows.arguments import parse_flow
from flows.prepared import handed
from flows.stopping import terminated
from tasks.quiet import quiet_console
from tasks.scratch import scratch

_NOT_LOOKED_AT = "the model's files, the data, rewards, disks, checkpoints to resume from, addresses. --check looks at them"


def main(flow: Any, session: Any, arguments: list[str] | None = None) -> int:
    """Run the flow as the arguments say. Returns the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    Args:
        session: class with config_type, planned_actors(config) and prepare(config, scratch): see flows/session.py.

    Raises:
        SystemExit: SIGTERM, with 143; everything has been cleared then.
    """
    options = parse_flow("run" if flow.name == "grpo" else flow.name, arguments)
    try:
        config = load(options.recipe, options.overrides, session.config_type)
        if options.dry_run:
            print(plan(config, session))
            return 0
        if options.check:
            return _check(config, session)
        with terminated(), scratch(), tempfile.TemporaryDirectory() as place:
            model = Path(place) / "model"
            with located(options.recipe, options.overrides, session.config_type):
                prepared = session.prepare(config, model)  # before anything else of the run starts: a wrong input should cost seconds
            with handed(config, prepared, model):
                return _run(flow, options)
    except (ConfigError, UserEnvironmentError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(config: BaseConfig, session: Any) -> int:
    from flows.checks import checked

    with terminated(), scratch():
        for line in checked(config, session):
            print(line, flush=True)
    print("this run can begin")
    return 0


def plan(config: BaseConfig, session: Any) -> str:
    """The resolved configuration, the actors that a run would start, and what they would need of a GPU."""
    actors = "\n".join(f"  {name:<18} {what}" for name, what in session.planned_actors(config))
    return f"{dump(config)}\nActors (none started by --dry-run):\n{actors}{_memory(config)}\nNot checked by --dry-run: {_NOT_LOOKED_AT}"


def _memory(config: BaseConfig) -> str:
    if not isinstance(config, BaseRunConfig):
        return ""
    try:
        needs = render(planned_memory(config), gpu_capacity())
        try:
            needs += "".join(f"\n  warning: {line}" for line in check_memory(config))
        except ConfigError as error:
            needs += f"\n  would be refused: {error}"
    except ConfigError as error:  # a dry run may come before the model
        needs = f"  unknown: {error}"
    return f"\nMemory of a GPU, where there is one, by phase of a step (planned; * marks the largest):\n{needs}" if needs else ""


def _run(flow: Any, options: argparse.Namespace) -> int:
    from flows.service.pages import reports_server
    from flows.service.server import prefect_server

    try:
        with prefect_server() as url, reports_server():
            print(f"Prefect UI: {url}")
            quiet_console()
            flow(recipe=options.recipe, overrides=options.overrides)
    except KeyboardInterrupt:
        print("interrupted: the run's actors have ended", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001  (the flow has logged the traceback; a person wants the line)
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def exit_code(work: Callable[[], int]) -> int:
    """What a command returns: `work`'s code; 2 wrong input, 1 failed, with one line for the person who typed it."""
    try:
        return work()
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001  (the flow has logged the traceback; a person wants the line)
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
