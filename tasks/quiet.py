"""The terminal belongs to the progress bar."""

from __future__ import annotations

import logging

from prefect.logging.handlers import PrefectConsoleHandler


def quiet_console() -> None:
    """Leave the terminal to the progress bar: Prefect's line for each task run goes to the UI alone."""
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.ERROR)
