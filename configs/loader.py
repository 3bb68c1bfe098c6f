"""Recipe + overrides -> the configuration of a run. `load("arithmetic-cpu", ["model.hidden_size=256"])`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import yaml
from pydantic import ValidationError

from configs.base import ConfigError, did_you_mean, explain
from configs.redaction import redacted
from configs.run import BaseConfig, BaseRunConfig, RunConfig

RECIPES = Path(__file__).parent / "recipes"
_DEEPEST, _MOST_VALUES = 50, 100_000


def recipe_names(root: type[BaseConfig] = RunConfig) -> list[str]:
    """The names that `load` knows without a path, of the flow whose configuration is `root`."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if _flow(yaml.safe_load(path.read_text())) == _flow_of(root))


@overload
def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig: ...
@overload
def load[C: BaseConfig](recipe: str, overrides: Sequence[str], root: type[C]) -> C: ...
def load(recipe: str, overrides: Sequence[str] = (), root: type[BaseConfig] = RunConfig) -> BaseConfig:
    """Read a recipe by name or path, apply `dotted.field=value` overrides (values are YAML), and validate.

    Args:
        root: the configuration of the flow that is to run; a recipe says in its field `flow` which one it is for (default: grpo).

    Raises:
        ConfigError: no such recipe, one of another flow, no such field, or a value that does not fit; one message names them all.
    """
    values = _read(recipe, root)
    flow = _flow(values)
    if flow != _flow_of(root):
        raise ConfigError(f"recipe {recipe!r} is for the flow {flow!r}, not for {_flow_of(root)!r}: run `python -m flows.{flow}`")
    for override in overrides:
        _apply(values, override)
    try:
        return root.model_validate(values)
    except ValidationError as error:
        raise explain(error, root, f"recipe {recipe!r}") from None


def dump(config: BaseConfig) -> str:
    """The resolved configuration as YAML that `load` reads back to an equal object."""
    data = config.model_dump(mode="json", exclude_none=True)
    # A model taken from `path` has no shape fields of its own: written out, they would contradict the path.
    if isinstance(config, BaseRunConfig) and (config.model.path or config.model.gguf):
        data["model"] = config.model.model_dump(include={"path", "gguf"}, exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False)


def _flow(values: Any) -> Any:
    return values.get("flow", _flow_of(RunConfig))


def _flow_of(root: type[BaseConfig]) -> Any:
    return root.model_fields["flow"].default


def _read(recipe: str, root: type[BaseConfig]) -> dict[str, Any]:
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else RECIPES / f"{recipe}.yaml"
    if not _is_file(path):
        names = recipe_names(root)
        hint = did_you_mean(recipe, names, f"recipes: {', '.join(names)}; or give a path that ends in .yaml")
        raise ConfigError(f"no recipe {recipe!r}: {hint}")
    try:
        values = _parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the message itself quotes the line, which may hold a key
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of fields, this file holds {type(values).__name__}")
    return values


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for a file
        return False


def _parse(text: str | bytes) -> Any:
    try:
        value = yaml.safe_load(text)
    except (ValueError, AttributeError, RecursionError) as error:  # "2020-13-45", "!!timestamp x", ten thousand brackets
        raise yaml.MarkedYAMLError(problem=f"a value that cannot be read ({type(error).__name__})") from None
    waiting, count = [(value, 0)], 0
    while waiting:  # an alias may hold itself, or be a list of ten aliases that are lists of ten aliases ...
        one, depth = waiting.pop()
        waiting += [(inner, depth + 1) for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())]
        count += 1
        if depth > _DEEPEST or count > _MOST_VALUES:
            raise yaml.MarkedYAMLError(problem="too many values, one within the other; an alias that holds itself?")
    return value


def _apply(values: dict[str, Any], override: str) -> None:
    name, sep, text = override.partition("=")
    if not sep or not name:
        raise ConfigError(f"override {redacted(override)!r}: write field=value, for example model.hidden_size=256")
    *parents, leaf = name.split(".")
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {redacted(override)!r}: {parent!r} is a value, not a block of fields")
        node = child
    try:
        node[leaf] = _parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {name}: the value is not valid YAML") from None
