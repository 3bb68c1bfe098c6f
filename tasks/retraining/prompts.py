"""What is new: the prompts under the data URL that no promoted model was trained on. Pure but for `read_files`.

    file known?      content                                  new
    no               -                                        all of it
    yes              begins with what was consumed            what was added after it
    yes              anything else: it was rewritten          all of it
    under any name   equal to a file that was consumed        nothing: it was renamed

A last line that is not complete JSON yet is left for the next night. Prompts of the frozen set and repeated lines are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from actors.environments.dataset.problems import problem, prompt_digest
from actors.environments.dataset.rows import json_lines, parse_line
from actors.storage import Content, Folder
from configs.base import ConfigError
from configs.environment import FieldsConfig


@dataclass(frozen=True)
class Row:
    """A line with all its columns, as JSON with its keys in order; and the digest of its prompt alone."""

    line: str
    digest: bytes


@dataclass(frozen=True)
class NewPrompts:
    """What a night can train on.

    Attributes:
        prompts: rows in the order of files and lines.
        files: names of the files that hold something new.
        repeated, held_out: numbers of new lines that are left out: repeated ones, and those of the frozen set.
        consumed: content by file that is consumed once a model trained on this is promoted; includes what was consumed before.
    """

    prompts: tuple[Row, ...]
    files: tuple[str, ...]
    repeated: int
    held_out: int
    consumed: Mapping[str, Content]


def read_files(url: str) -> dict[str, bytes]:
    """The .jsonl files under the URL (or the one at it), by name; those that begin with a dot or underscore are not read.

    Raises:
        ConfigError: the URL cannot be reached, or nothing is there.
    """
    folder = Folder(url, "data.url")
    found = folder.info()
    if found is None:
        raise ConfigError(f"data.url: nothing is at {url}: check the URL, or create the folder for new prompts")
    if found["type"] == "file":
        return {folder.root.rpartition("/")[2]: folder.read() or b""}
    hidden = re.compile(r"(^|/)[._]")
    names = [name for name in folder.names(below=True) if name.endswith(".jsonl") and not hidden.search(name)]
    return {name: content for name in names if (content := folder.read(name)) is not None}


def read_frozen(url: str, fields: FieldsConfig) -> list[Row]:
    """Every line of the frozen set.

    Raises:
        ConfigError: the URL cannot be reached, a line is damaged, or there is none.
    """
    content = Folder(url, "frozen_set.url").read()
    if content is None:
        raise ConfigError(f"frozen_set.url: nothing is at {url}: check the URL, or write the frozen set")
    rows = parse(url, content, fields)
    if not rows:
        raise ConfigError(f"frozen_set.url: {url} is empty; write one JSON object per line, with prompt and answer")
    return rows


def find_new(files: Mapping[str, bytes], consumed: Mapping[str, Content], frozen: Collection[bytes], fields: FieldsConfig) -> NewPrompts:
    """Prompts that were not consumed.

    Args:
        files: bytes by name. consumed: content by name, from the lineage of the promoted model.
        frozen: digests of prompts that must not be trained on.

    Raises:
        ConfigError: a line without prompt or answer; names file, line and column.
    """
    known = {one.sha256 for one in consumed.values()}
    after = dict(consumed)
    prompts: dict[Row, None] = {}
    touched, repeated, held_out = [], 0, 0
    for name in sorted(files):
        content = _complete(files[name])
        if not content:
            continue
        after[name] = Content.of(content)
        if after[name].sha256 in known:
            continue
        before = consumed.get(name)
        start = before.size if before and Content.of(content[: before.size]) == before else 0
        rows = parse(name, content, fields, start)
        for row in rows:
            if row.digest in frozen:
                held_out += 1
            elif row in prompts:
                repeated += 1
            else:
                prompts[row] = None
        if rows:
            touched.append(name)
    return NewPrompts(tuple(prompts), tuple(touched), repeated, held_out, after)


def parse(name: str, content: bytes, fields: FieldsConfig, start: int = 0) -> list[Row]:
    """Each line from byte `start` on; blank lines are passed over.

    Raises:
        ConfigError: names file, line and column.
    """
    rows = []
    first = content[:start].count(b"\n")
    for number, line in json_lines(content[start:].split(b"\n"), first):
        place = f"{name}, line {number}"
        row = parse_line(line, place)
        found = problem(row, fields, uid=str(number), place=place)
        rows.append(Row(json.dumps(row, sort_keys=True), prompt_digest(found)))
    return rows


def write(rows: Collection[Row]) -> str:
    """The lines of a .jsonl file."""
    return "".join(f"{row.line}\n" for row in rows)


def digest(rows: Collection[Row]) -> str:
    """SHA-256 of the lines in their order."""
    return hashlib.sha256(write(rows).encode()).hexdigest()


def _complete(content: bytes) -> bytes:
    head, newline, tail = content.rpartition(b"\n")
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return head + newline
    return content
