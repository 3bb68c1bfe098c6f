"""References to secrets: `${env:NAME}` and `${file:path}`. The configuration, and all that is written of it, holds the reference alone.

recipe: ${env:JUDGE_KEY} ──► config, config.yaml, report, Prefect parameters: ${env:JUDGE_KEY}
                         ├── resolve(), where it is used: the value
                         └── gather(), in the flow's process ──► know(), in an actor that may be on another machine
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from configs import settings
from configs.base import ConfigError
from configs.redaction import REFERENCE, remember

_known: dict[str, str] = {}  # by reference: values that another process has looked up for this one


def _is_one(value: str) -> str:
    if not REFERENCE.fullmatch(value):
        raise ValueError("a secret is given by reference, ${env:NAME} or ${file:path}, and never written into a recipe")
    return value


SecretReference = Annotated[str, AfterValidator(_is_one)]


def resolve[T](value: T, field: str) -> T:
    """The value with every reference in it replaced; lists and mappings are copied, everything else is returned as it is.

    Args:
        field: what the recipe calls the value, for messages.

    Raises:
        ConfigError: an environment variable that is not set, or a file that cannot be read; never with a secret in the message.
    """
    resolved: Any = value
    if isinstance(value, str):
        resolved = REFERENCE.sub(lambda match: _look_up(match[0], match[1], match[2], field), value)
    elif isinstance(value, dict):
        resolved = {key: resolve(item, f"{field}.{key}") for key, item in value.items()}
    elif isinstance(value, list | tuple):
        resolved = type(value)(resolve(item, f"{field}[{index}]") for index, item in enumerate(value))
    return cast(T, resolved)


def gather(value: Any, field: str) -> dict[str, str]:
    """Every reference within the value, with what it refers to: for a process that may be on another machine (`know`).

    Raises:
        ConfigError: as `resolve`.
    """
    if isinstance(value, str):
        return {match[0]: _look_up(match[0], match[1], match[2], field) for match in REFERENCE.finditer(value)}
    if isinstance(value, Mapping):
        return {name: found for key, item in value.items() for name, found in gather(item, f"{field}.{key}").items()}
    if isinstance(value, list | tuple):
        return {name: found for index, item in enumerate(value) for name, found in gather(item, f"{field}[{index}]").items()}
    return {}


def know(gathered: Mapping[str, str]) -> None:
    """From now on `resolve` takes these values, in this process."""
    _known.update(gathered)


def _look_up(reference: str, kind: str, name: str, field: str) -> str:
    value = _known.get(reference)
    if value is None:
        value = _found(kind, name, field)
    remember(value, reference)
    return value


def _found(kind: str, name: str, field: str) -> str:
    if kind == "env":
        value = settings.get(name)
        if value is None:
            raise ConfigError(f"{field}: the environment variable {name} is not set: export it before the run, or refer to a file")
        return value
    try:
        return Path(name).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: the file {name} cannot be read: {type(error).__name__}") from None
