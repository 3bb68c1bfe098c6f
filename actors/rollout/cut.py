"""The rollout side at one moment, as files: what a resumed run must know of every prompt that was drawn and is not done.

rollout.json           ledger, prompt stream, prompts without a place, groups in flight and being scored, what the curriculum, or a report,
                       has not seen
responses.safetensors  tokens and log-probabilities of the responses that those groups have
rows.safetensors       rows of the stored groups (written by the collector)

A numbered problem is kept by its number, and asked for again; a streamed one, which cannot be, as its value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from actors.environments import Problem
from actors.environments.dataset.problems import prompt_digest
from actors.environments.scoring.verdict import Verdict
from actors.generation.types import FinishReason, GenerationResult
from actors.rollout.in_flight import PromptGroup, request_id
from actors.rollout.prompts import LEVEL, DrawnPrompt, PromptStream
from actors.rollout.rows import read_rows, write_rows
from actors.rollout.samples import Sample, SlowSample
from actors.rollout.scoring import Finished
from actors.rollout.staleness import Group
from actors.rollout.transitions import Admitted

FILE, RESPONSES, ROWS = "rollout.json", "responses.safetensors", "rows.safetensors"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Unreported(_Strict):
    """Of groups that the curriculum has seen since the last report, in the order of drawing; `tokens`: generated since then."""

    verdicts: tuple[Verdict, ...] = ()
    samples: tuple[Sample, ...] = ()
    slowest: tuple[SlowSample, ...] = ()
    tokens: NonNegativeInt = 0


NOTHING = Unreported()


@dataclass(frozen=True)
class RolloutState:
    """The loop between two of its turns, and the ledger at that moment.

    Attributes:
        ledger: `Ledger.state`. stream: `PromptStream.state`.
        drawn: prompts without a place, in the order of drawing.
        flying: groups that lack responses. scoring: groups that have all. Each in the order of admission.
        begun: in the order of drawing, by uid, groups that the curriculum has not seen; None: not scored yet.
        unreported: for the next step's report.
    """

    ledger: dict[str, Any]
    stream: dict[str, Any]
    drawn: tuple[DrawnPrompt, ...]
    flying: tuple[PromptGroup, ...]
    scoring: tuple[PromptGroup, ...]
    begun: dict[str, Finished | None]
    unreported: Unreported = NOTHING

    def kept(self) -> dict[str, int]:
        """Of the groups that have responses, by uid: the lowest weight version of their tokens."""
        groups = (*self.flying, *self.scoring)
        return {group.uid: min(result.weight_version_start for result in group.results.values()) for group in groups if group.results}

    def at(self, places: Iterable[Admitted]) -> RolloutState:
        """With these places; groups that got none are left out."""
        given = {place.uid: place for place in places}
        flying, scoring = (
            tuple(replace(group, reservation=given[group.uid]) for group in groups if group.uid in given)
            for groups in (self.flying, self.scoring)
        )
        begun = {uid: done for uid, done in self.begun.items() if done is not None or uid in given}
        return replace(self, flying=flying, scoring=scoring, begun=begun)


class _Problem(_Strict):
    """`number`, `level`: to ask for it again; `digest`: of its prompt, hexadecimal. `value`: what cannot be asked for again."""

    number: NonNegativeInt | None
    level: NonNegativeInt | None
    digest: str
    value: Problem | None


class _Prompt(_Strict):
    uid: str
    problem: _Problem
    token_ids: list[int]


class _Response(_Strict):
    """Its tokens are in the other file."""

    row: NonNegativeInt
    finish_reason: FinishReason
    weight_segments: tuple[tuple[int, int], ...]


class _Group(_Prompt):
    responses: tuple[_Response, ...]


class _Finished(_Strict):
    problem: _Problem
    verdicts: tuple[Verdict, ...]
    sample: Sample | None


class _Begun(_Strict):
    uid: str
    done: _Finished | None


class _Ledger(_Strict):
    version: NonNegativeInt
    trained_now: NonNegativeInt
    counts: dict[str, NonNegativeInt]
    ages: dict[int, NonNegativeInt]
    since_commit: float
    last_failure: str
    groups: tuple[Group, ...]


class _Curriculum(_Strict):
    level: NonNegativeInt
    accuracies: list[float]


class StreamState(_Strict):
    """`PromptStream.state`."""

    seed: int
    size: NonNegativeInt | None
    position: NonNegativeInt
    dropped: NonNegativeInt
    truncated: NonNegativeInt
    curriculum: _Curriculum | None
    source: dict[str, Any] | None


class _File(_Strict):
    """`sampler`, `rows`: the rule and the responses per prompt that the ledger's groups were admitted with."""

    format: Literal[1] = 1
    sampler: str
    rows: int
    ledger: dict[str, Any]
    stream: dict[str, Any]
    drawn: tuple[_Prompt, ...]
    flying: tuple[_Group, ...]
    scoring: tuple[_Group, ...]
    begun: tuple[_Begun, ...]
    unreported: Unreported = NOTHING

    # Both stay the JSON that they are, as their owners take it: a validated copy would have other values for NaN.
    @field_validator("ledger")
    @classmethod
    def _a_ledger(cls, value: dict[str, Any]) -> dict[str, Any]:
        _Ledger.model_validate(value)
        return value

    @field_validator("stream")
    @classmethod
    def _a_stream(cls, value: dict[str, Any]) -> dict[str, Any]:
        StreamState.model_validate(value)
        return value


def save_rollout(directory: Path, state: RolloutState, stream: PromptStream, *, sampler: str, rows: int) -> None:
    """Write rollout.json and responses.safetensors.

    Args:
        sampler: the ledger's rule. rows: number of responses per prompt.

    Raises:
        CheckpointError: a streamed problem has a value that JSON does not know; names the prompt and the column.
    """
    results = {request_id(group.uid, row): found for group in (*state.flying, *state.scoring) for row, found in group.results.items()}
    columns = {
        "token_ids": [torch.tensor(result.token_ids, dtype=torch.int64) for result in results.values()],
        "logprobs": [torch.tensor(result.logprobs, dtype=torch.float64) for result in results.values()],
    }
    write_rows(directory / RESPONSES, tuple(results), columns)
    begun = [
        _Begun(uid=uid, done=done and _Finished(problem=_problem(stream, uid, done.problem), verdicts=done.verdicts, sample=done.sample))
        for uid, done in state.begun.items()
    ]
    file = _File(
        sampler=sampler,
        rows=rows,
        ledger=state.ledger,
        stream=state.stream,
        drawn=tuple(
            _Prompt(uid=drawn.uid, problem=_problem(stream, drawn.uid, drawn.problem), token_ids=drawn.token_ids) for drawn in state.drawn
        ),
        flying=tuple(_group(stream, group) for group in state.flying),
        scoring=tuple(_group(stream, group) for group in state.scoring),
        begun=tuple(begun),
        unreported=state.unreported,
    )
    (directory / FILE).write_text(json.dumps(file.model_dump()), encoding="utf-8")


def load_rollout(directory: Path, stream: PromptStream, *, sampler: str, rows: int) -> RolloutState:
    """The inverse of `save_rollout`. Sets the stream back to where it stood; the places are those that the groups had.

    Raises:
        CheckpointError: a file is damaged, contradicts itself, or is of another run's rule or group size, or the data have changed.
        ConfigError: the seed, the number of problems or the curriculum is another.
    """
    try:
        file = _File.model_validate(json.loads((directory / FILE).read_bytes()))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{FILE}: cannot be read: {error}") from None
    if file.ledger["groups"] and (file.sampler, file.rows) != (sampler, rows):
        raise CheckpointError(
            f"{FILE}: its groups were begun with sampler {file.sampler!r} and {file.rows} responses per prompt, this run has "
            f"{sampler!r} and {rows}: resume with those"
        )
    try:
        stream.restore(file.stream)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{FILE}: stream.source: the data source cannot go on from it: {error!r}") from error
    places = _places(file)
    responses = _responses(directory, file)
    flying, scoring = (
        tuple(PromptGroup(_again(stream, group), group.token_ids, places[group.uid], responses[group.uid]) for group in groups)
        for groups in (file.flying, file.scoring)
    )
    return RolloutState(
        ledger=file.ledger,
        stream=file.stream,
        drawn=tuple(DrawnPrompt(drawn.uid, _again(stream, drawn), drawn.token_ids) for drawn in file.drawn),
        flying=flying,
        scoring=scoring,
        begun={one.uid: _finished(stream, one.uid, one.done) for one in file.begun},
        unreported=file.unreported,
    )


def stored_rows(ledger: Mapping[str, Any]) -> KVBatchMeta | None:
    """The rows of all stored groups of a ledger's state, in the order of their admission; None: there are none.

    Raises:
        CheckpointError: they do not have the same columns.
    """
    metas = [KVBatchMeta.model_validate(group["meta"]) for group in ledger["groups"] if group["meta"] is not None]
    if len({meta.fields for meta in metas}) > 1:
        raise CheckpointError(f"{ROWS}: the stored groups do not have the same columns")
    return KVBatchMeta.concat(metas) if metas else None


def load_rows(directory: Path, meta: KVBatchMeta) -> dict[str, list[torch.Tensor]]:
    """The columns of the stored groups, in the order of `meta`.

    Raises:
        CheckpointError: the file is damaged, or has other rows or columns.
    """
    keys, columns = read_rows(directory / ROWS)
    if keys != meta.keys or columns.keys() != meta.fields:
        raise CheckpointError(f"{ROWS}: {len(keys)} rows with columns {sorted(columns)}, {FILE} has {len(meta)} with {sorted(meta.fields)}")
    return columns


def _problem(stream: PromptStream, uid: str, problem: Problem) -> _Problem:
    number = stream.number(uid)
    if number is None and (place := _no_json(problem.columns, "columns")):
        raise CheckpointError(f"{FILE}: prompt {uid} ({problem.uid}): {place}: a streamed problem is kept as JSON, which has no such value")
    return _Problem(
        number=number,
        level=problem.columns.get(LEVEL) if number is not None else None,
        digest=prompt_digest(problem).hex(),
        value=problem if number is None else None,
    )


def _no_json(value: Any, place: str) -> str | None:
    """Where something is that would not come back from JSON as it was."""
    if type(value) is dict:
        if strange := [name for name in value if type(name) is not str]:
            return f"{place}: key {strange[0]!r}"
        return next((found for name, item in value.items() if (found := _no_json(item, f"{place}.{name}"))), None)
    if type(value) is list:
        return next((found for index, item in enumerate(value) if (found := _no_json(item, f"{place}[{index}]"))), None)
    return None if value is None or type(value) in (bool, int, float, str) else f"{place}: {type(value).__name__}"


def _again(stream: PromptStream, saved: _Prompt) -> Problem:
    return _load_problem(stream, saved.uid, saved.problem)


def _load_problem(stream: PromptStream, uid: str, saved: _Problem) -> Problem:
    if saved.value is not None:
        return saved.value
    if saved.number is None:
        raise CheckpointError(f"{FILE}: prompt {uid} has neither a number nor a value")
    try:
        problem = stream.again(saved.number, saved.level)
    except IndexError:
        raise CheckpointError(
            f"{FILE}: prompt {uid}: there is no problem {saved.number} at level {saved.level}: the data have changed"
        ) from None
    if prompt_digest(problem).hex() != saved.digest:
        raise CheckpointError(f"{FILE}: prompt {uid} is another than was drawn: the data have changed")
    return problem


def _group(stream: PromptStream, group: PromptGroup) -> _Group:
    responses = [
        _Response(row=row, finish_reason=result.finish_reason, weight_segments=result.weight_segments)
        for row, result in group.results.items()
    ]
    return _Group(uid=group.uid, problem=_problem(stream, group.uid, group.problem), token_ids=group.prompt, responses=tuple(responses))


def _finished(stream: PromptStream, uid: str, saved: _Finished | None) -> Finished | None:
    if saved is None:
        return None
    return Finished(_load_problem(stream, uid, saved.problem), saved.verdicts, saved.sample)


def _places(file: _File) -> dict[str, Admitted]:
    """Of the groups in flight, by uid.

    Raises:
        CheckpointError: the ledger and the loop do not know the same groups.
    """
    groups = [group for group in _Ledger.model_validate(file.ledger).groups if group.state in ("in_flight", "cancelled")]
    places = {group.uid: Admitted(group.uid, group.keys, group.start_version, group.target_version) for group in groups}
    known = [group.uid for group in (*file.flying, *file.scoring)]
    if strange := sorted(places.keys() ^ set(known)) or sorted({uid for uid in known if known.count(uid) > 1}):
        raise CheckpointError(f"{FILE}: group {strange[0]!r} is not once in the ledger and once in the loop")
    return places


def _responses(directory: Path, file: _File) -> dict[str, dict[int, GenerationResult]]:
    """By uid of the group and by row."""
    saved = [(group.uid, response) for group in (*file.flying, *file.scoring) for response in group.responses]
    keys, columns = read_rows(directory / RESPONSES)
    if keys != tuple(request_id(uid, response.row) for uid, response in saved) or columns.keys() != {"token_ids", "logprobs"}:
        raise CheckpointError(f"{RESPONSES}: other responses, or other columns, than {FILE} has")
    found: dict[str, dict[int, GenerationResult]] = {group.uid: {} for group in (*file.flying, *file.scoring)}
    for (uid, response), tokens, logprobs in zip(saved, columns["token_ids"], columns["logprobs"], strict=True):
        if not 0 < len(tokens) == len(logprobs) == sum(count for _, count in response.weight_segments):
            raise CheckpointError(f"{RESPONSES}: response {response.row} of group {uid!r} has {len(tokens)} tokens, {FILE} says otherwise")
        found[uid][response.row] = GenerationResult(
            request_id(uid, response.row), tokens.tolist(), logprobs.tolist(), response.finish_reason, response.weight_segments
        )
    return found
