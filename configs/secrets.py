"""References to secrets: `${env:NAME}` and `${file:path}`. The configuration, and all that is written of it, holds the reference alone.

recipe: ${env:JUDGE_KEY} ──► config, config.yaml, report, Prefect parameters: ${env:JUDGE_KEY}
                         └── resolve(), in the flow's process ──► actor argument: the value
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from configs import settings
from configs.base import ConfigError

_REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")


def _is_one(value: str) -> str:
    if not _REFERENCE.fullmatch(value):
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
        resolved = _REFERENCE.sub(lambda match: _look_up(match[1], match[2], field), value)
    elif isinstance(value, dict):
        resolved = {key: resolve(item, f"{field}.{key}") for key, item in value.items()}
    elif isinstance(value, list | tuple):
        resolved = type(value)(resolve(item, f"{field}[{index}]") for index, item in enumerate(value))
    return cast(T, resolved)


def _look_up(kind: str, name: str, field: str) -> str:
    if kind == "env":
        value = settings.get(name)
        if value is None:
            raise ConfigError(f"{field}: the environment variable {name} is not set: export it before the run, or refer to a file")
        return value
    try:
        return Path(name).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: the file {name} cannot be read: {type(error).__name__}") from None
