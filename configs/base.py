"""The strict model that every configuration class derives from, and the error that a person reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from configs import other_names
from configs.redaction import redacted

type Place = tuple[str | int, ...]
_FIELD = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class ConfigError(ValueError):
    """A configuration that cannot run. The message names the field (or file) and says what to do."""


class StrictModel(BaseModel):
    """Immutable; refuses fields that it does not know, and true or false where a number belongs. An empty block counts as left out."""

    # An input may be a secret that was written where a reference belongs; `explain` decides which are shown.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: _no_number(value) if name in kinds and _is_number(kinds[name]) else value
            for name, value in values.items()
            if value is not None or not _is_block(kinds.get(name))
        }


def _is_block(annotation: Any) -> bool:
    return get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel))


def _is_number(annotation: Any) -> bool:
    """Whether int or float fits, and neither text nor bool does."""
    parts = {annotation, *_within(annotation)}
    return bool({int, float} & parts) and not {bool, str, Any} & parts


def _within(annotation: Any) -> list[Any]:
    return [inner for arg in get_args(annotation) for inner in (type(arg) if isinstance(arg, bool) else arg, *_within(arg))]


def _no_number(value: Any) -> Any:
    """With text in place of a bool, which pydantic refuses; it would take True for 1."""
    if isinstance(value, list | tuple):
        return [_no_number(one) for one in value]
    return str(value).lower() if isinstance(value, bool) else value


def _names_of_variables(values: tuple[str, ...]) -> tuple[str, ...]:
    for name in values:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{name!r} is no name of a variable; values are not written into a recipe")
    return values


VariableNames = Annotated[tuple[str, ...], AfterValidator(_names_of_variables)]


def did_you_mean(name: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A question that holds the nearest of the names, whatever the case; `otherwise` when none is as similar as `cutoff` (difflib)."""
    known = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=cutoff)
    return f"did you mean {known[near[0]]!r}?" if near else otherwise


def explain(error: ValidationError, root: type[BaseModel], source: str, places: Mapping[Place, str] | None = None) -> ConfigError:
    """Turn pydantic's report into one `ConfigError` with a part per field and, for typos, the nearest valid name.

    Args:
        places: where a field was given, by its path: "line 3".
    """
    places, lines = places or {}, []
    for item in error.errors():
        path, message = item["loc"], item["msg"].removeprefix("Value error, ")
        name, where = ".".join(map(str, path)) or "(whole configuration)", said_place(named_places(message, places, path))
        if item["type"] == "extra_forbidden":
            lines += _unknown(root, path, item["input"], places)
        elif item["type"] == "missing":
            lines.append(f"{name}: this field must be set{where}")
        elif item["type"] == "union_tag_invalid":
            tag = str(item["ctx"]["tag"])
            lines.append(f"{name}.kind: there is no {redacted(repr(tag))}; {_nearest(item['ctx'], tag)}{where}")
        else:
            given = item.get("input")
            if item["type"] == "literal_error":
                message = _nearest(item["ctx"], str(given))
            shown = "" if path[-1:] == ("api_key",) or _holds_fields(given) else f" (got {redacted(repr(given))})"
            lines.append(f"{name}: {message}{shown}{where}")
    return ConfigError(f"{source}: " + "; ".join(lines))


def _nearest(context: Mapping[str, Any], given: str) -> str:
    """The one of the allowed values that is most like the given one, as a question; none is: all of them."""
    expected = str(context.get("expected_tags") or context["expected"])  # "'sync' or 'async'"; of numbers "0, 1 or 2"
    return did_you_mean(given, re.findall(r"'([^']*)'", expected), f"use one of {expected.replace(' or ', ', ')}".replace("'", ""))


def _unknown(root: type[BaseModel], path: Place, value: Any, places: Mapping[Place, str]) -> list[str]:
    """A line for a field that does not exist; for a block of another project's, one for each field in it that is known."""
    names = [str(part) for part in path]
    answers = other_names.answers(names, value, lambda field: has_field(root, field.split("."))) or {
        ".".join(names): f"no such field{_suggest(root, names)}"
    }
    lines = []
    for name, answer in answers.items():
        place = places.get(_given((*path, *name.split(".")[len(path) :]), places), "")
        lines.append(f"{name}: {answer}{said_place([place])}")
    return lines


def named_places(message: str, places: Mapping[Place, str], block: Place = ()) -> list[str]:
    """Where the fields that a message names were given, such as "line 3"; of none, where the block that it is about was.

    Args:
        block: path of the field that the message is about. Of the whole configuration only names with a dot count, and the one that the
            message begins with: other words may be English.
    """
    inside, found = _given(block, places), []
    for match in _FIELD.finditer(message):
        name = tuple(match[0].split("."))
        if inside and (*inside, *name) in places:
            found.append(places[*inside, *name])
        elif name in places and (len(name) > 1 or (match.start() == 0 and not block)):
            found.append(places[name])
    return found or [places.get(inside, "")]


def said_place(found: Iterable[str]) -> str:
    """(line 3) or (lines 3 and 7), of "line 3" and "line 7"; empty when there is none."""
    lines = sorted({int(place.removeprefix("line ")) for place in found if place})
    if len(lines) < 2:
        return "".join(f" (line {line})" for line in lines)
    return f" (lines {', '.join(map(str, lines[:-1]))} and {lines[-1]})"


def _given(path: Place, places: Mapping[Place, str]) -> Place:
    """The field, or the innermost block around it, that was given."""
    if path in places:
        return path
    found: Place = ()
    for part in path:
        if (*found, part) in places:
            found = (*found, part)
        elif not (found and isinstance(found[-1], int)):  # which model of a union it is stands in pydantic's path, and not in the recipe
            break
    return found


def has_field(root: type[BaseModel], path: list[str]) -> bool:
    models = [root]
    for part in path:
        annotations = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if not annotations:
            return False
        models = [found for annotation in annotations for found in _models_of(annotation)]
    return True


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
