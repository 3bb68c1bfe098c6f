"""From a row to a problem: prompt and answer by their fields, and the other columns as they are. Pure.

A prompt is text or a chat; an answer is text or a number (3 is "3", 0.5 is "0.5"). Everything else is refused with its file, line and
column: nothing becomes text that was not meant as text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from actors.environments.base import Problem
from configs.base import ConfigError, did_you_mean
from configs.environment import FieldsConfig

_ROLES = ("system", "user", "assistant")


def problem(row: Mapping[str, Any], fields: FieldsConfig, *, uid: str, place: str, field: str = "environment") -> Problem:
    """The problem in a row.

    Args:
        place: file and line, for messages. field: what the recipe calls the block that has `fields`, likewise.

    Raises:
        ConfigError: a field that is missing, empty, or neither text nor what it may be; says where and what to do.
    """
    prompt, answer = (
        _field(row, path, f"{field}.fields.{name}", place) for name, path in (("prompt", fields.prompt), ("answer", fields.answer))
    )
    messages = None if isinstance(prompt, str) else _messages(prompt, f"{place}: column {fields.prompt!r}")
    question = prompt if messages is None else messages[-1]["content"]
    if not question.strip():
        raise ConfigError(f"{place}: column {fields.prompt!r} is empty: there is nothing to answer")
    encodable(question if messages is None else json.dumps(messages, ensure_ascii=False), f"{place}: column {fields.prompt!r}")
    return Problem(
        uid=uid,
        question=question,
        answer=_answer(answer, f"{place}: column {fields.answer!r}"),
        messages=messages,
        columns={name: _plain(value) for name, value in row.items()},
    )


def prompt_digest(one: Problem) -> bytes:
    """Equal for equal prompts, whatever their answers; the space around them does not count."""
    chat = [("user", one.question)] if one.messages is None else [(message["role"], message["content"]) for message in one.messages]
    stripped = [(role, content.strip()) for role, content in chat]
    return hashlib.sha256(json.dumps(stripped).encode()).digest()


def _field(row: Mapping[str, Any], path: str, setting: str, place: str) -> Any:
    if path in row:  # a column may have a dot in its name
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = [str(name) for name in value] if isinstance(value, Mapping) else []
            hint = did_you_mean(part, names, f"it has {', '.join(names) or 'nothing inside'}", cutoff=0.5)
            raise ConfigError(f"{place}: no column {path!r} ({setting}); {hint}")
        value = value[part]
    return value


def _messages(prompt: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(prompt, list):
        raise ConfigError(f"{where} is {_kind(prompt)}: a prompt is text, or a chat: a list of {{role, content}}")
    if not prompt:
        raise ConfigError(f"{where} is an empty chat: there is nothing to answer")
    for number, message in enumerate(prompt, start=1):
        named = f"{where}, message {number}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ConfigError(f"{named}: a message is {{role, content}}, this is {_kind(message)}")
        if message["role"] not in _ROLES:
            raise ConfigError(f"{named}: role {message['role']!r}: use one of {', '.join(_ROLES)}")
        if not isinstance(message["content"], str):
            raise ConfigError(f"{named}: content is {_kind(message['content'])}, text is wanted")
    if prompt[-1]["role"] != "user":
        raise ConfigError(
            f"{where}: the last message is of the {prompt[-1]['role']}: the chat must end with one of the user's, to be answered"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _answer(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where} is {_kind(value)}: an answer is text or a number")
    if isinstance(value, float) and not math.isfinite(value):  # pandas writes a missing number as NaN
        raise ConfigError(f"{where} is {value!r}, which is no number: remove the row, or give it an answer")
    text = value if isinstance(value, str) else repr(value)
    if not text.strip():
        raise ConfigError(f"{where} is empty: a response without a word would be right; remove the row, or give it an answer")
    encodable(text, where)
    return text


def encodable(text: str, where: str) -> None:
    """
    Raises:
        ConfigError: half of a surrogate pair is in the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half of a surrogate pair, which no tokenizer takes: write the whole character") from None


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _plain(value: Any) -> Any:
    """What rewards get: JSON's own kinds; everything else as its text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
