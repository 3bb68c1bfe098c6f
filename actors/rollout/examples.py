"""Prompts with the responses to learn: lines of JSON or rows of Parquet, by any fsspec URL, split into train and validation.

    train.jsonl ────────────┐ read_rows ──► Problem(question, answer), uid "file:line" ──┬──► train
    validation.parquet ─────┘                                                            └──► validation (a file, or a fraction)

An `Environment` has the same two methods, so that its questions and answers are a data set as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec
import numpy as np

from actors.environments import Problem, Split, build
from actors.environments.dataset.problems import encodable
from actors.environments.dataset.rows import json_lines, parse_line, reading
from actors.rollout.prompts import Problems
from configs.base import ConfigError, did_you_mean
from configs.secrets import resolve
from configs.sft import SupervisedDataConfig

REJECTED = "data.rejected_field"  # among a problem's columns: a response to which its answer is preferred
_SPLIT = 7919  # beside the run's seed: the held-out rows are not the first ones of an epoch's order


class FileProblems:
    """The rows of one or two files. All of them stay in memory, as text.

    Raises:
        ConfigError: a file that cannot be read, that holds no rows, or has a row without the fields; it names file, row and field.
    """

    def __init__(self, config: SupervisedDataConfig, seed: int) -> None:
        assert config.train is not None  # SupervisedDataConfig checks it
        prompt, response, rejected = config.prompt_field, config.response_field, config.rejected_field
        rows = read_rows(config.train, prompt, response, "data.train", rejected)
        if config.validation is not None:
            held_out = read_rows(config.validation, prompt, response, "data.validation", rejected)
        else:
            assert config.split is not None
            if len(rows) < 2:
                raise ConfigError(f"data.split: {config.train} has 1 row, which cannot be split: give data.validation")
            rows, held_out = split_rows(rows, config.split, seed)
        self._rows: dict[Split, list[Problem]] = {"train": rows, "validation": held_out}

    def size(self, split: Split) -> int:
        return len(self._rows[split])

    def problem(self, split: Split, index: int) -> Problem:
        return self._rows[split][index]


def build_problems(config: SupervisedDataConfig, seed: int) -> Problems:
    """The data set that the recipe names.

    Raises:
        ConfigError: it cannot be read or made, or is empty; names the field.
    """
    return FileProblems(config, seed) if config.environment is None else build(config.environment, seed)


def split_rows(rows: list[Problem], fraction: float, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, validation): the seed draws `fraction` of two or more rows, at least one and not all, for validation. Both keep the order."""
    count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    chosen = {int(row) for row in np.random.default_rng((seed, _SPLIT)).permutation(len(rows))[:count]}
    return [row for i, row in enumerate(rows) if i not in chosen], [row for i, row in enumerate(rows) if i in chosen]


def read_rows(url: str, prompt_field: str, response_field: str, config_field: str, rejected_field: str | None = None) -> list[Problem]:
    """Every row of a .jsonl or .parquet file. Blank lines are passed over; other fields are not kept (of Parquet: not read).

    Args:
        url: a path or an fsspec URL. config_field: what the recipe calls it, for messages.
        rejected_field: of the worse response, which becomes the column `REJECTED`; None: there is none.

    Raises:
        ConfigError: no such file, a damaged row, a field that is missing or no text, an empty response, or no rows at all.
    """
    fields = {"data.prompt_field": prompt_field, "data.response_field": response_field}
    fields |= {} if rejected_field is None else {REJECTED: rejected_field}
    with reading(url, config_field), fsspec.open(resolve(url, config_field), "rb") as file:
        if PurePosixPath(url).suffix == ".parquet":
            rows = _parquet_rows(file, url, fields)
        else:
            rows = ((number, parse_line(line, f"{url}, line {number}")) for number, line in json_lines(file))
        problems = [_problem(url, number, row, fields) for number, row in rows]
    if not problems:
        raise ConfigError(f"{config_field}: {url} is empty: no rows to read")
    return problems


def _parquet_rows(file: IO[bytes], url: str, fields: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as parquet  # 0.2 s, for those who need it

    table = parquet.ParquetFile(file)
    for setting, name in fields.items():
        if name not in table.schema_arrow.names:
            raise _no_field(setting, name, url, table.schema_arrow.names)
    batches = table.iter_batches(columns=list(dict.fromkeys(fields.values())))
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _problem(url: str, number: int, row: dict[str, Any], fields: dict[str, str]) -> Problem:
    where = f"{url}, {'row' if url.endswith('.parquet') else 'line'} {number}"
    texts = []
    for setting, name in fields.items():
        if name not in row:
            raise _no_field(setting, name, where, row)
        if not isinstance(row[name], str):
            raise ConfigError(f"{where}: field {name!r} is {type(row[name]).__name__}, text is wanted")
        encodable(row[name], f"{where}: field {name!r}")
        texts.append(row[name])
    prompt, response, *rejected = texts
    for name, text in zip(list(fields.values())[1:], texts[1:], strict=True):
        if not text:
            raise ConfigError(f"{where}: field {name!r} is empty: there is nothing to learn from it")
    return Problem(uid=f"{url}:{number}", question=prompt, answer=response, columns={REJECTED: rejected[0]} if rejected else {})


def _no_field(setting: str, name: str, where: str, given: Iterable[str]) -> ConfigError:
    names = list(given)
    hint = did_you_mean(name, names, f"it has {', '.join(names) or 'none'}")
    return ConfigError(f"{setting}: {where} has no field {name!r}; {hint}")
