"""A recipe's file -> its values, and the line of each field for messages.

bytes ──► nodes ──► lines, keys that are given twice
            └─────► values
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from configs.base import ConfigError, Place
from configs.redaction import redacted

_DEEPEST, _MOST_VALUES = 50, 100_000


def read(path: Path) -> tuple[dict[str, Any], dict[Place, str]]:
    """The fields of a recipe, and where each stands: {("policy", "optimizer"): "line 12"}.

    Raises:
        ConfigError: the file cannot be read, is no UTF-8 text or no valid YAML, gives a key twice, or holds something else than fields.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text (byte 0x{content[error.start]:02x}): save the file as UTF-8") from None
    try:
        values, lines = parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the message itself quotes the line, which may hold a key
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {problem(error)}") from None
    if values is None:
        raise ConfigError(f"{path}: a recipe is a mapping of fields, this file is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of fields, this file holds {type(values).__name__}")
    return values, {place: f"line {line}" for place, line in lines.items()}


def problem(error: yaml.YAMLError) -> str:
    """What is wrong, without the text that has it, which may hold a key."""
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__)


def parse(text: str) -> tuple[Any, dict[Place, int]]:
    """The value that YAML text holds, and the line of each of its keys and items, from 1.

    Raises:
        yaml.YAMLError: not valid, a key that is given twice, or too large.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            lines = _lines(node) if node is not None else {}
            value = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except (ValueError, AttributeError, RecursionError) as error:  # "2020-13-45", "!!timestamp x", ten thousand brackets
        raise yaml.MarkedYAMLError(problem=f"a value that cannot be read ({type(error).__name__})") from None
    _check_size(value)
    return value, lines


def _lines(root: yaml.Node) -> dict[Place, int]:
    lines: dict[Place, int] = {}
    waiting: list[tuple[Place, yaml.Node]] = [((), root)]
    seen: set[int] = set()
    while waiting:
        place, node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            _no_key_twice(node)
            children = [((*place, key.value), key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        elif isinstance(node, yaml.SequenceNode):
            children = [((*place, index), item, item) for index, item in enumerate(node.value)]
        else:
            continue
        lines |= {inner: at.start_mark.line + 1 for inner, at, _ in children}
        waiting += [(inner, value) for inner, _, value in children]
    return lines


def _no_key_twice(node: yaml.MappingNode) -> None:
    first: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in first:
            lines = first[key.value], key.start_mark.line + 1
            where = f"in lines {lines[0]} and {lines[1]}" if lines[0] < lines[1] else "in one line"
            twice = f"{redacted(repr(key.value))} is given twice, {where}: keep one"
            raise yaml.MarkedYAMLError(problem=twice, problem_mark=key.start_mark)
        first[key.value] = key.start_mark.line + 1


def _check_size(value: Any) -> None:
    waiting, count = [(value, 0)], 0
    while waiting:  # an alias may hold itself, or be a list of ten aliases that are lists of ten aliases ...
        one, depth = waiting.pop()
        waiting += [(inner, depth + 1) for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())]
        count += 1
        if depth > _DEEPEST or count > _MOST_VALUES:
            raise yaml.MarkedYAMLError(problem="too many values, one within the other; an alias that holds itself?")
