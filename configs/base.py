"""The strict model that every configuration class derives from, and the error that a person reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from configs.redaction import redacted


class ConfigError(ValueError):
    """A configuration that cannot run. The message names the field (or file) and says what to do."""


class StrictModel(BaseModel):
    """Immutable, and refuses fields that it does not know."""

    # An input may be a secret that was written where a reference belongs; `explain` decides which are shown.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)


def _names_of_variables(values: tuple[str, ...]) -> tuple[str, ...]:
    for name in values:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{name!r} is no name of a variable; values are not written into a recipe")
    return values


VariableNames = Annotated[tuple[str, ...], AfterValidator(_names_of_variables)]


def did_you_mean(name: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A question that holds the nearest of the names; `otherwise` when none is as similar as `cutoff` (`difflib.get_close_matches`)."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise


def explain(error: ValidationError, root: type[BaseModel], source: str) -> ConfigError:
    """Turn pydantic's report into one `ConfigError` with a line per field and, for typos, the nearest valid name."""
    lines = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        name = ".".join(path) or "(whole configuration)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: no such field{_suggest(root, path)}")
        elif item["type"] == "missing":
            lines.append(f"{name}: this field must be set")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item.get("input")
            shown = "" if path[-1:] == ["api_key"] or _holds_fields(given) else f" (got {redacted(repr(given))})"
            lines.append(f"{name}: {message}{shown}")
    return ConfigError(f"{source}: " + "; ".join(lines))


def _holds_fields(value: Any) -> bool:
    """Whether the value is, or has within it, a block of fields: too much to show, and one of them may be an `api_key`."""
    return isinstance(value, dict | BaseModel) or (isinstance(value, list | tuple) and any(map(_holds_fields, value)))


def _suggest(root: type[BaseModel], path: list[str]) -> str:
    models = [root]
    for part in path[:-1]:
        annotations = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if annotations:
            models = [found for annotation in annotations for found in _models_of(annotation)]
        else:  # a place in a list, a key of a dict, or which model of a union it is
            models = [model for model in models if part in _tags(model)] or models
    names = list(dict.fromkeys(name for model in models for name in model.model_fields))
    return "; " + did_you_mean(path[-1], names, f"valid fields here: {', '.join(names)}", cutoff=0.5) if names else ""


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for arg in get_args(annotation) for found in _models_of(arg)]


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field else ()
