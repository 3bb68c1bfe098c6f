"""rollout.json and its tensors: all comes back, and what is damaged, foreign or cannot be kept is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from actors.environments.base import Problem, Split
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Part, Verdict
from actors.generation.types import GenerationResult
from actors.rollout.cut import FILE, RESPONSES, ROWS, RolloutState, Unreported, load_rollout, load_rows, save_rollout, stored_rows
from actors.rollout.in_flight import PromptGroup, request_id
from actors.rollout.ledger import Ledger
from actors.rollout.prompts import LEVEL, DrawnPrompt, PromptStream
from actors.rollout.rows import write_rows
from actors.rollout.samples import Sample
from actors.rollout.scoring import Finished
from actors.rollout.staleness import build
from actors.rollout.transitions import Admitted
from configs.base import ConfigError
from configs.curriculum import CurriculumConfig
from configs.staleness import AsyncConfig
from tests.outside import places_in

RULE: dict[str, Any] = {"sampler": "windowed", "rows": 2}
COLUMNS = {"text": "\ud800 ä", "number": 0.1 + 0.2, "nan": float("nan"), "nested": [{"a": None}, [True, 2**70]], "empty": {}}


class Numbered:
    """Twenty problems, each at three levels; a verifier's own object is among the columns."""

    word = "problem"
    levels = 3

    def size(self, split: Split) -> int:
        return 20

    def problem(self, split: Split, index: int) -> Problem:
        return self.problem_at(0, split, index)

    def problem_at(self, level: int, split: Split, index: int) -> Problem:
        if index >= self.size(split):
            raise IndexError(index)
        chat = ({"role": "user", "content": f"{self.word} {index} at {level}"},)
        return Problem(f"p:{index}", chat[0]["content"], "a", chat, {"verifier": object, 3: (level,)}, "mix")


class Streamed(Numbered):
    """The same without numbers."""

    columns: dict[str, Any] = COLUMNS
    drawn = 0

    def next_train(self) -> Problem:
        self.drawn += 1
        return replace(self.problem_at(0, "train", self.drawn - 1), columns=self.columns)

    def stream_state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def restore_stream(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def numbered() -> PromptStream:
    return PromptStream(Numbered(), 3)


def leveled() -> PromptStream:
    return PromptStream(Numbered(), 3, curriculum=CurriculumConfig(window=2, start_level=1))


def streamed() -> PromptStream:
    return PromptStream(Streamed(), 3)


KINDS = pytest.mark.parametrize("make", [numbered, leveled, streamed])


def state_of(stream: PromptStream) -> RolloutState:
    """Two prompts drawn; one group in flight without responses and one with one; one being scored; one stored, but not observed."""
    config = AsyncConfig(max_trajectory_age_steps=3, sampler="windowed")
    ledger = Ledger(build(config, 4), capacity=9, max_in_flight=9, version=4, clear=lambda keys: None, clock=lambda: 7.0)
    problems = dict(stream.draw(6))
    uids = list(problems)
    places = []
    for uid in uids[:4]:
        place = ledger.reserve(uid, 2)
        assert isinstance(place, Admitted)
        places.append(place)
    groups = [PromptGroup(problems[place.uid], [1, 2, 3], place) for place in places]
    for group, rows in ((groups[1], [1]), (groups[2], [1, 0]), (groups[3], [0, 1])):
        for row in rows:
            segments = ((4, 1), (5, 2)) if row else ((5, 3),)
            group.results[row] = GenerationResult(request_id(group.uid, row), [7, 2**40, row], [-0.1, -1 / 3, -1e-300], "length", segments)
    metas = KVBatchMeta(
        partition_id="train", keys=places[3].keys, fields=frozenset({"input_ids"}), sequence_lengths=(3, 4), tags=({"reward": 0.1},) * 2
    )
    ledger.commit(uids[3], metas, 4, 5)
    verdict = Verdict(0.5, "scored", None, "no", {"math": Part(None, "failed", 0.25, "why"), "other": Part(0.5)})
    sample = Sample.of(problems[uids[3]], Response("text", 3, True), verdict, 4)
    begun = {uids[0]: None, uids[1]: None, uids[2]: None, uids[3]: Finished(problems[uids[3]], (verdict, verdict), sample)}
    drawn = tuple(DrawnPrompt(uid, problems[uid], [9, 8]) for uid in uids[4:])
    unreported = Unreported(verdicts=(verdict,), samples=(sample,), slowest=(sample.slow,), tokens=3)
    return RolloutState(ledger.state(), stream.state(), drawn, (groups[0], groups[1]), (groups[2],), begun, unreported)


def values(problem: Problem) -> Any:
    """All of it; two problems are equal by less. NaN as text."""
    return problem.uid, problem.question, problem.answer, problem.messages, repr(problem.columns), problem.source


@KINDS
def test_everything_comes_back(make: Callable[[], PromptStream], tmp_path: Path) -> None:
    stream, there = make(), make()
    state = state_of(stream)
    save_rollout(tmp_path, state, stream, **RULE)
    back = load_rollout(tmp_path, there, **RULE)
    assert back == state
    for ours, theirs in zip(
        [*state.drawn, *state.flying, *state.scoring, *filter(None, state.begun.values())],
        [*back.drawn, *back.flying, *back.scoring, *filter(None, back.begun.values())],
        strict=True,
    ):
        assert values(ours.problem) == values(theirs.problem)
    assert there.state() == stream.state()
    assert [(uid, values(problem)) for uid, problem in there.draw(5)] == [(uid, values(problem)) for uid, problem in stream.draw(5)]
    if make is leveled:
        assert {drawn.problem.columns[LEVEL] for drawn in back.drawn} == {1}


def test_what_is_kept_decides_the_start_version_and_who_got_no_place_is_left_out(tmp_path: Path) -> None:
    state = state_of(numbered())
    without, one, scored, stored = state.begun
    assert state.kept() == {one: 4, scored: 4}
    placed = state.at([Admitted(one, ("new", "keys"), 4, None)])
    assert ([group.uid for group in placed.flying], placed.flying[0].reservation.keys, placed.scoring) == ([one], ("new", "keys"), ())
    assert list(placed.begun) == [one, stored]
    assert without not in placed.kept()


def test_a_streamed_problem_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for columns, place in (
        ({"a": {"b": [1, (2,)]}}, r"columns\.a\.b\[1\]: tuple"),
        ({"a": {1: 2}}, r"columns\.a: key 1"),
        ({"a": b""}, r"columns\.a: bytes"),
        ({"a": object}, r"columns\.a: type"),
    ):
        source = Streamed()
        source.columns = columns  # type: ignore[assignment]
        stream = PromptStream(source, 3)
        with pytest.raises(CheckpointError, match=rf"rollout\.json: prompt s\d \(p:\d\): {place}"):
            save_rollout(tmp_path, state_of(stream), stream, **RULE)


def test_a_cut_of_other_data_or_another_rule_is_refused(tmp_path: Path) -> None:
    stream = numbered()
    save_rollout(tmp_path, state_of(stream), stream, **RULE)
    for rule in ({"sampler": "in_order", "rows": 2}, {"sampler": "windowed", "rows": 3}):
        with pytest.raises(CheckpointError, match=r"begun with sampler 'windowed' and 2 responses per prompt, this run has"):
            load_rollout(tmp_path, numbered(), **rule)
    with pytest.raises(ConfigError, match="seed 3, these of seed 4"):
        load_rollout(tmp_path, PromptStream(Numbered(), 4), **RULE)
    for field, value in (("number", 20), ("level", 1)):
        content = json.loads((tmp_path / FILE).read_text())
        content["drawn"][0]["problem"][field] = value
        (tmp_path / FILE).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"there is no problem .* at level .*: the data have changed"):
            load_rollout(tmp_path, numbered(), **RULE)
        save_rollout(tmp_path, state_of(numbered()), stream, **RULE)
    changed = Numbered()
    changed.word = "task"
    with pytest.raises(CheckpointError, match=r"prompt 0\.\d+ is another than was drawn: the data have changed"):
        load_rollout(tmp_path, PromptStream(changed, 3), **RULE)


def damaged(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The error that a cut causes whose JSON was changed."""
    stream = streamed()
    save_rollout(tmp_path, state_of(stream), stream, **RULE)
    content = json.loads((tmp_path / FILE).read_text())
    change(content)
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as error:
        load_rollout(tmp_path, streamed(), **RULE)
    return str(error.value)


def test_a_file_that_contradicts_itself_is_refused_by_name(tmp_path: Path) -> None:
    for change, message in (
        (lambda file: file.pop("drawn"), "rollout.json: drawn: Field required"),
        (lambda file: file.update(more=1), "rollout.json: more: Extra inputs are not permitted"),
        (lambda file: file.update(format=2), "rollout.json: format: "),
        (lambda file: file["ledger"].pop("ages"), "rollout.json: ledger"),
        (lambda file: file["ledger"]["groups"][0].update(more=1), "rollout.json: ledger"),
        (lambda file: file["stream"].update(position=-1), "rollout.json: stream"),
        (lambda file: file["stream"].update(source={}), "rollout.json: stream.source: the data source cannot go on"),
        (lambda file: file["flying"].pop(0), "is not once in the ledger and once in the loop"),
        (lambda file: file["flying"].append(file["flying"][0]), "is not once in the ledger and once in the loop"),
        (lambda file: file["ledger"]["groups"].pop(0), "is not once in the ledger and once in the loop"),
        (lambda file: file["scoring"][0]["responses"].pop(), "responses.safetensors: other responses"),
        (lambda file: file["scoring"][0]["responses"][0].update(weight_segments=[[4, 9]]), "responses.safetensors: response 1 of group"),
        (lambda file: file["drawn"][0]["problem"].update(value=None), "has neither a number nor a value"),
        (lambda file: file["drawn"][0]["problem"]["value"].update(more=1), "rollout.json: drawn.0.problem.value"),
    ):
        assert message in damaged(tmp_path, change)  # type: ignore[arg-type]


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rollout\.json: cannot be read"):
        load_rollout(tmp_path, numbered(), **RULE)
    stream = numbered()
    save_rollout(tmp_path, state_of(stream), stream, **RULE)
    whole = (tmp_path / FILE).read_bytes()
    for content in (b"", b"\xff", b"[]", b"null", whole[:-1], b"[" * 100_000):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"rollout\.json"):
            load_rollout(tmp_path, numbered(), **RULE)
    (tmp_path / FILE).write_bytes(whole)
    (tmp_path / RESPONSES).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"responses\.safetensors: cannot be read"):
        load_rollout(tmp_path, numbered(), **RULE)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), make=st.sampled_from([numbered, leveled, streamed]))
def test_whatever_one_value_becomes_the_error_is_ours(data: st.DataObject, make: Callable[[], PromptStream], tmp_path: Path) -> None:
    stream = make()
    save_rollout(tmp_path, state_of(stream), stream, **RULE)
    content = json.loads((tmp_path / FILE).read_text())
    *parents, last = data.draw(st.sampled_from(places_in(content)))
    within = content
    for name in parents:
        within = within[name]
    within[last] = data.draw(st.sampled_from([None, -1, 10**30, 0.5, "x", "", [], {}, [[]], {"a": 1}, True]))
    (tmp_path / FILE).write_text(json.dumps(content))
    with suppress(CheckpointError, ConfigError):
        load_rollout(tmp_path, make(), **RULE)


def test_stored_rows_are_those_of_the_ledger(tmp_path: Path) -> None:
    state = state_of(numbered())
    meta = stored_rows(state.ledger)
    assert meta is not None
    assert (len(meta), meta.fields, meta.sequence_lengths, meta.tags) == (2, {"input_ids"}, (3, 4), ({"reward": 0.1},) * 2)
    assert stored_rows({"groups": []}) is None
    for keys, columns in ((("a", "b"), {"input_ids": []}), (meta.keys, {})):
        write_rows(tmp_path / ROWS, keys if columns == {} else (), columns)
        with pytest.raises(CheckpointError, match=r"rows\.safetensors: \d rows with columns"):
            load_rows(tmp_path, meta)
    groups = state.ledger["groups"]
    other = {**groups[3], "meta": {**groups[3]["meta"], "fields": [], "keys": ["x", "y"]}}
    with pytest.raises(CheckpointError, match="do not have the same columns"):
        stored_rows({"groups": [*groups, other]})
