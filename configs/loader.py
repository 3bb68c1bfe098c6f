"""Recipe + overrides -> the configuration of a run. `load("arithmetic-cpu", ["model.hidden_size=256"])`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import yaml
from pydantic import ValidationError

from configs.base import ConfigError, Place, did_you_mean, explain, named_places, said_place
from configs.evaluate import EvaluateConfig
from configs.recipe_file import parse, problem, read
from configs.redaction import redacted
from configs.retrain import RetrainConfig
from configs.run import BaseConfig, BaseRunConfig, RunConfig
from configs.sft import SftConfig

RECIPES, PRESETS = Path(__file__).parent / "recipes", Path(__file__).parent / "presets"


def recipe_names(root: type[BaseConfig] = RunConfig) -> list[str]:
    """The names that `load` knows without a path, of the flow whose configuration is `root`."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if _flow(yaml.safe_load(path.read_text())) == _flow_of(root))


@overload
def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig: ...
@overload
def load[C: BaseConfig](recipe: str, overrides: Sequence[str], root: type[C]) -> C: ...
def load(recipe: str, overrides: Sequence[str] = (), root: type[BaseConfig] = RunConfig) -> BaseConfig:
    """Read a recipe by name or path, apply `dotted.field=value` overrides (values are YAML), and validate.

    `preset: NAME` in a recipe of `grpo` stands for the fields of an algorithm (configs/presets), beneath what else the recipe says; as an
    override it goes over the recipe, and beneath the other overrides. Its rewards come beside the recipe's.

    Args:
        root: the configuration of the flow that is to run; a recipe says in its field `flow` which one it is for (default: grpo).

    Raises:
        ConfigError: no such recipe, one of another flow, no such field, or a value that does not fit; one message names them all.
    """
    values, places = read(path_of(recipe, root))
    if root is RunConfig:
        values, overrides = _with_presets(values, overrides)
    for override in overrides:
        _apply(values, places, override)
    _check_flow(recipe, values, places, root)
    try:
        return root.model_validate(values)
    except ValidationError as error:
        raise explain(error, root, f"recipe {recipe!r}", places) from None


def load_any(recipe: str, overrides: Sequence[str] = ()) -> BaseConfig:
    """As `load`, of whichever flow the recipe is for.

    Raises:
        ConfigError: as `load`.
    """
    values, _ = read(path_of(recipe))
    root = next((root for root in ROOTS if _flow_of(root) == _flow(values)), RunConfig)  # which says that there is no such flow
    return load(recipe, overrides, root)


@contextmanager
def located(recipe: str, overrides: Sequence[str], root: type[BaseConfig] = RunConfig) -> Iterator[None]:
    """Add to a ConfigError from within, which is about a configuration that `load` has read, where the recipe gives the fields it names.

    Raises:
        ConfigError: the same, with file and line.
    """
    try:
        yield
    except ConfigError as error:
        values, places = read(path_of(recipe, root))
        for override in overrides:
            if not override.startswith("preset="):
                _apply(values, places, override)
        where = said_place(named_places(str(error), places, _field_at_start(str(error))))
        raise ConfigError(f"{error}{where.replace('(', f'({recipe}, ')}") from error


def _field_at_start(message: str) -> Place:
    """environment.path, of "environment.path: there is no such file"."""
    name = message.partition(":")[0]
    return tuple(name.split(".")) if "." in name and " " not in name else ()


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


ROOTS: tuple[type[BaseConfig], ...] = (RunConfig, SftConfig, EvaluateConfig, RetrainConfig)
_FLOWS = [_flow_of(root) for root in ROOTS]


def _check_flow(recipe: str, values: Mapping[str, Any], places: Mapping[Place, str], root: type[BaseConfig]) -> None:
    flow = _flow(values)
    if flow not in _FLOWS:
        hint = did_you_mean(str(flow), _FLOWS, f"flows: {', '.join(_FLOWS)}")
        where = said_place([places.get(("flow",), "")])
        raise ConfigError(f"recipe {recipe!r}: flow: there is no flow {redacted(repr(flow))}; {hint}{where}")
    if flow != _flow_of(root):
        raise ConfigError(f"recipe {recipe!r} is for the flow {flow!r}, not for {_flow_of(root)!r}: run `python -m flows.{flow}`")


def path_of(recipe: str, root: type[BaseConfig] | None = None) -> Path:
    """The file of a recipe that is given by name or path. `root`: whose names are offered where there is none; None: all.

    Raises:
        ConfigError: there is no such file; names the nearest recipe.
    """
    given = recipe.endswith((".yaml", ".yml"))
    path = Path(recipe) if given else RECIPES / f"{recipe}.yaml"
    if _is_file(path):
        return path
    names = [name for one in ROOTS if root in (one, None) for name in recipe_names(one)]
    if given:
        hint = did_you_mean(path.stem, names, f"give the path of a recipe, or a name: {', '.join(names)}")
        raise ConfigError(f"recipe: there is no file {recipe}; {hint}")
    hint = did_you_mean(recipe, names, f"recipes: {', '.join(names)}; or give a path that ends in .yaml")
    raise ConfigError(f"no recipe {recipe!r}: {hint}")


def preset_names() -> list[str]:
    """The names of algorithms."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _with_presets(values: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields with those of the presets that are named, and the overrides that name none."""
    values = dict(values)
    if (named := values.pop("preset", None)) is not None:
        preset = _preset(named)
        values = _merged(preset, values) | _rewards(values, preset)
    for override in overrides:
        if override.startswith("preset="):
            preset = _preset(override.removeprefix("preset="))
            values = _merged(values, preset) | _rewards(values, preset)
    return values, [override for override in overrides if not override.startswith("preset=")]


def _preset(name: Any) -> dict[str, Any]:
    names = preset_names()
    if name not in names:
        raise ConfigError(f"preset: there is no {redacted(repr(name))}; {did_you_mean(str(name), names, f'presets: {", ".join(names)}')}")
    values, _ = read(PRESETS / f"{name}.yaml")
    return values


def _rewards(values: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's rewards and beside them the preset's, but for those that it has itself; nothing unless both have some."""
    own, further = values.get("rewards"), preset.get("rewards")
    if not isinstance(own, list) or not further:
        return {}
    labels = [reward.get("name") or reward.get("kind") for reward in own if isinstance(reward, dict)]
    return {"rewards": [*own, *(reward for reward in further if reward["kind"] not in labels)]}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    blocks = {
        name: _merged(below[name], value) for name, value in above.items() if isinstance(value, dict) and isinstance(below.get(name), dict)
    }
    return {**below, **above, **blocks}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for a file
        return False


def _apply(values: dict[str, Any], places: dict[Place, str], override: str) -> None:
    name, sep, text = override.partition("=")
    if not sep or not name:
        raise ConfigError(f"override {redacted(override)!r}: write field=value, for example model.hidden_size=256")
    *parents, leaf = name.split(".")
    node = values
    for parent in parents:
        if node.get(parent) is None:  # not given, or an empty block
            node[parent] = {}
        child = node[parent]
        if not isinstance(child, dict):
            raise ConfigError(f"override {redacted(override)!r}: {parent!r} is a value, not a block of fields")
        node = child
    try:
        node[leaf], _ = parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {name}: not valid YAML: {problem(error)}") from None
    path = (*parents, leaf)
    for inner in [place for place in places if place[: len(path)] == path]:
        del places[inner]
    places[path] = ""  # what the recipe's block around it has does not count
