"""The reference of settings, from the classes in configs/: a section for each block of fields, a row for each field.

RunConfig ──► "policy.loss": LossConfig ──► | clip_low | number above 0 | 0.2 | what its description says |
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.evaluate import EvaluateConfig
from configs.retrain import RetrainConfig
from configs.run import RunConfig
from configs.sft import SftConfig

ROOTS = (RunConfig, SftConfig, EvaluateConfig, RetrainConfig)
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything", NoneType: "null"}


def markdown() -> str:
    """All blocks of all flows; one that has been shown is named there, and not shown again with what is in it."""
    parts, seen = [], dict[type[BaseModel], str]()
    for root in ROOTS:
        flow = str(root.model_fields["flow"].default)
        parts.append(f"\n## {flow}\n")
        shown: tuple[str, ...] = ()  # elsewhere
        for path, model in blocks(root):
            name = path or "the recipe itself"
            if path.startswith(shown):
                continue
            if model in seen:
                parts.append(f"`{name}` is [{seen[model]}](#{_anchor(seen[model])}).\n")
                shown = (*shown, f"{path}.", f"{path}[")
                continue
            seen[model] = f"{flow}: {name}"
            parts += [f"### {seen[model]}\n", f"{_doc(model)}\n", *table(model), ""]
    return "\n".join(parts)


def blocks(root: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, class) of a configuration and of all blocks within it, from the outside in. In a list the name ends in `[]`."""
    yield path, root
    for name, field in root.model_fields.items():
        for mark, model in _models(field.annotation):
            kind = model.model_fields.get("kind")
            which = f"{{kind: {kind.default}}}" if mark == "[]" and kind is not None and get_origin(kind.annotation) is Literal else ""
            yield from blocks(model, f"{path}.{name}{mark}{which}".lstrip("."))


def _models(annotation: Any, mark: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield mark, annotation
    marks = {tuple: "[]", list: "[]", dict: ".NAME"}
    for inner in get_args(annotation):
        yield from _models(inner, mark or marks.get(get_origin(annotation) or NoneType, ""))


def table(model: type[BaseModel]) -> list[str]:
    """A row for each field: name, type, default, description."""
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = field.description or next((_doc(inner).partition("\n")[0] for _, inner in _models(field.annotation)), "")
        shown = (f"`{name}`", kind(field.annotation, field.metadata), _default(field), meaning)
        rows.append(f"| {' | '.join(text.replace('|', chr(92) + '|').replace('<', '&lt;') for text in shown)} |")
    return rows


def kind(annotation: Any, metadata: Any = ()) -> str:
    """What may be written for a field, in words."""
    bounds = [text for item in metadata for text in _bounds(item)]
    return _kind(annotation) + (f", {' and '.join(bounds)}" if bounds else "")


def _kind(annotation: Any) -> str:
    if isinstance(annotation, TypeAliasType):
        return _kind(annotation.__value__)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inner[0], inner[1:])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(one) for one in inner))
    if origin in (tuple, list):
        return f"list of {_kind(inner[0])}"
    if origin in (dict, Mapping) or annotation is dict:
        return f"block of names with {_kind(inner[1])}" if inner and inner[1] is not Any else "block"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    return _PLAIN.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _bounds(item: Any) -> Iterator[str]:
    if isinstance(item, Interval):
        for part in item:
            yield from _bounds(part)
    for which, words in ((Gt, "above"), (Ge, "at least"), (Lt, "below"), (Le, "at most")):
        if isinstance(item, which):
            yield f"{words} {getattr(item, which.__name__.lower()):g}"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_defaults=True)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "must be set"
    if isinstance(value, BaseModel) or value == {}:
        return ""
    if isinstance(value, str) and len(value) > 60:
        return "see the source"
    shown = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
    return f"`{json.dumps(shown, default=_plain)}`" if not isinstance(shown, str) or not shown else f"`{shown}`"


def _doc(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def _anchor(heading: str) -> str:
    """As Sphinx's MyST makes it of a heading."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
