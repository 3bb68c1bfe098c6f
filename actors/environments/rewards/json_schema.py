"""1 when the response is a JSON document of the wanted form."""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import SPECIFICATIONS, Draft202012Validator, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import SchemaRegistry, specification_with

from actors.environments.base import Problem
from actors.environments.rewards.base import Response, Reward
from configs import rewards as configured
from configs.base import ConfigError

_FENCE = re.compile(r"^[ \t]*```([^`\n]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "json")


class JsonSchemaReward(Reward):
    """The last fenced block of JSON in the response is judged, without one the whole response. No other document is fetched.

    Raises:
        ConfigError: the schema is none, is of an unknown draft, or refers to what is not in it.
    """

    def __init__(self, config: configured.JsonSchemaReward) -> None:
        field, schema = f"rewards.{config.label}.json_schema", config.json_schema
        draft = schema.get("$schema", Draft202012Validator.META_SCHEMA["$schema"])
        kind = validator_for({"$schema": draft}, default=None) if isinstance(draft, str) else None
        if kind is None:
            raise ConfigError(f"{field}.$schema: no known draft of JSON Schema: {schema['$schema']!r}; leave it out for 2020-12")
        try:
            kind.check_schema(schema)
            _see_inside(schema, kind)
        except SchemaError as error:
            where = ".".join(str(part) for part in error.absolute_path) or "(its root)"
            raise ConfigError(f"{field}: not a JSON schema: {where}: {error.message}") from None
        except Unresolvable as error:
            raise ConfigError(f"{field}: $ref {error.ref!r} leads nowhere: other documents are not fetched, copy it into $defs") from None
        except re.error as error:  # drafts 3 and 4 do not say that patterns are to be checked
            raise ConfigError(f"{field}: patternProperties: {error.pattern!r} is no regular expression: {error}") from None
        self._validator = kind(schema, registry=Registry())

    def score(self, problem: Problem, response: Response) -> float:
        blocks = [text for language, text in _FENCE.findall(response.text) if language.strip().casefold() in _LANGUAGES]
        try:
            document = json.loads(blocks[-1] if blocks else response.text, parse_constant=_no_number)
            return float(self._validator.is_valid(document))
        except (ValueError, RecursionError, OverflowError):  # no JSON, or so deep or large that nobody can use it
            return 0.0


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _see_inside(schema: Any, kind: Any) -> None:
    # Validators look a reference up when they come by it, which is too late: in the middle of a run.
    specification = specification_with(kind.META_SCHEMA["$schema"])
    registry: SchemaRegistry = SPECIFICATIONS
    root = specification.create_resource(schema)
    waiting = [(root, registry.resolver_with_root(root))]
    seen: set[int] = set()
    while waiting:
        resource, resolver = waiting.pop()
        contents = resource.contents
        if not isinstance(contents, dict) or id(contents) in seen:
            continue
        seen.add(id(contents))
        for pattern in contents.get("patternProperties", ()):
            re.compile(pattern)
        for key in ("$ref", "$dynamicRef"):
            if isinstance(reference := contents.get(key), str):
                found = resolver.lookup(reference)  # maybe in a place that the draft knows nothing of, such as components/schemas
                validator_for(found.contents, default=kind).check_schema(found.contents)
                waiting.append((Resource.from_contents(found.contents, default_specification=specification), found.resolver))
        waiting += [(sub, resolver.in_subresource(sub)) for sub in resource.subresources()]
