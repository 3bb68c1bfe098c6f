"""What a recipe names: something that comes with this project, or a class or function of one's own as `package.module:Name`."""

from __future__ import annotations

import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import AfterValidator

from configs.base import ConfigError, did_you_mean

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def one_of(known: Sequence[str], what: str) -> AfterValidator:
    """For the annotation of a field: a known name or an import path, of which nothing is imported; the error has the nearest name."""

    def check(value: str) -> str:
        if value in known or IMPORT_PATH.fullmatch(value):
            return value
        hint = did_you_mean(value, known, f"use one of {', '.join(known)}, or package.module:Name")
        raise ValueError(f"no such {what}; {hint}")

    return AfterValidator(check)


def said(error: BaseException) -> str:
    """In one line what a user's code raised, and the line of it: the innermost that is not of an installed package, if there is one."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    ours = str(Path(__file__).parents[1] / "actors"), str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<", *installed, *ours))]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def imported(path: str, field: str) -> Any:
    """The object at `package.module:Name`.

    Raises:
        ConfigError: it cannot be imported; the message names the field, and the nearest name in the module.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's module may raise anything, and a script exits)
        raise ConfigError(f"{field}: cannot import {path!r}: {said(error)}") from None
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module), "name a class or function of it")
        raise ConfigError(f"{field}: cannot import {path!r}: {module_name} has no {name!r}; {hint}")
    return getattr(module, name)


def imported_function(path: str, field: str, call: str, *args: object, **kwargs: object) -> Any:
    """The function at `package.module:name`, which takes such arguments. Args: call: how it is called, for the message.

    Raises:
        ConfigError: as `imported`, or it does not take them.
    """
    found = imported(path, field)
    try:
        inspect.signature(found).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{field}: {path!r} cannot be called as {call}: {error}") from None
    return found
