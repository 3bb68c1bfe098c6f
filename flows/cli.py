"""The command line of a flow: configuration first, then a Prefect server where none is configured, then the flow."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from prefect.logging.handlers import PrefectConsoleHandler

from actors.checkpoints.errors import CheckpointError
from actors.models.memory_plan import render
from actors.preflight import planned_memory
from configs.base import ConfigError
from configs.loader import dump, load, recipe_names
from configs.run import BaseConfig, BaseRunConfig
from tasks.scratch import scratch


def main(flow: Any, session: Any, arguments: list[str] | None = None) -> int:
    """Run the flow as the arguments say. Returns the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    Args:
        session: class with config_type, planned_actors(config) and prepare(config, scratch): see flows/session.py.

    Raises:
        SystemExit: SIGTERM, with 143; everything has been cleared then.
    """
    options = _parse(flow, session, arguments)
    try:
        config = load(options.recipe, options.overrides, session.config_type)
        if options.dry_run:
            print(plan(config, session))
            return 0
        with _terminated(), scratch():
            # Before anything starts: a wrong input should cost seconds. The flow checks again, for runs that a deployment started.
            with tempfile.TemporaryDirectory() as model:
                session.prepare(config, Path(model))
            return _run(flow, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@contextmanager
def _terminated() -> Iterator[None]:
    """A SIGTERM inside the block unwinds it. Prefect gives the signal back to this handler when it has cancelled the flow's run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unwind(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def plan(config: BaseConfig, session: Any) -> str:
    """The resolved configuration, the actors that a run would start, and what they would need of a GPU."""
    actors = "\n".join(f"  {name:<18} {what}" for name, what in session.planned_actors(config))
    return f"{dump(config)}\nActors (none started by --dry-run):\n{actors}{_memory(config)}"


def _memory(config: BaseConfig) -> str:
    if not isinstance(config, BaseRunConfig):
        return ""
    try:
        needs = "\n".join(f"  {name:<18} {render(parts)}" for name, parts in planned_memory(config).items())
    except ConfigError as error:  # a dry run may come before the model
        needs = f"  unknown: {error}"
    return f"\nMemory of a GPU, where there is one (estimates):\n{needs}" if needs else ""


def _run(flow: Any, options: argparse.Namespace) -> int:
    from flows.service.server import prefect_server

    try:
        with prefect_server() as url:
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


def quiet_console() -> None:
    """Leave the terminal to the progress bar: Prefect's line for each task run goes to the UI alone."""
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.ERROR)


def _parse(flow: Any, session: Any, arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m flows.{flow.name}", description=(flow.description or flow.name).split("\n\n")[0])
    names, default = ", ".join(recipe_names(session.config_type)), flow.parameters.properties["recipe"]["default"]
    parser.add_argument("--recipe", default=default, help=f"a name ({names}; default: {default}) or a path to a .yaml file")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the planned actors; start nothing")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="for example model.hidden_size=256 steps=20")
    return parser.parse_intermixed_args(arguments)  # options may stand between the fields
