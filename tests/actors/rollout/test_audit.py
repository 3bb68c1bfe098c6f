"""The audit: every life that the ledger can lead is clean, and whatever else a journal says is found at its first line."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.audit import Audit, audit
from actors.rollout.journal import Began, Cut, Finished, Record, Resumed, Stored, parse
from actors.rollout.transitions import Admitted, Announced, Cancelled, Claimed, Ended, Reissued, Released, Transition
from configs.staleness import SAMPLERS
from tests.actors.rollout.journals import began, life, written

SEEDS = st.integers(0, 2**20)


def judged(*records: Record | Transition) -> Audit:
    return audit(parse(written(records)))


def admitted(uid: str, version: int = 0, target: int | None = None) -> Admitted:
    return Admitted(uid, (f"{uid}0", f"{uid}1"), version, target)


def stored(uid: str, start: int = 0, end: int | None = None) -> Stored:
    return Stored(uid, (f"{uid}0", f"{uid}1"), start, start if end is None else end)


HELD = (began(), admitted("a"), stored("a"))
TAKEN = (*HELD, Claimed("a", 0))
TRAINED = (*TAKEN, Ended("a", "trained"))
OTHER = "its number|does not follow"


def test_a_short_life_in_numbers() -> None:
    found = judged(
        began(), admitted("a"), admitted("b"), stored("a"), Announced(1), Claimed("a", 1), Ended("a", "trained"),
        Ended("b", "failed"), admitted("c", 1), Cut(1, "step-1", 1),
        Announced(2), stored("c", 1), Claimed("c", 2), Ended("c", "trained"), Cut(2, "step-2", 2), admitted("d", 2),
        Resumed(9, "step-1", "the engine died"), Reissued("c", ("c0'", "c1'"), 1, 1), Stored("c", ("c0'", "c1'"), 1, 1),
        Ended("c", "evicted/too_old"), Finished(),
    )  # fmt: skip
    assert found.clean, found.verdict
    assert found.verdict == "clean: of 3 groups, 1 trained once, 2 ended with a reason"
    assert found.counts() == [("admitted", 3), ("trained", 1), ("evicted/too_old", 1), ("failed", 1)]
    assert (found.lines, found.surviving, found.cuts, found.reissued, found.version, found.ages) == (21, 15, 1, 1, 1, {1: 1})
    (void,) = found.voided
    assert (void.line, void.lines, void.groups, void.trained, void.versions) == (16, 6, 2, 1, (2,))


def test_a_run_that_has_not_finished_may_hold_groups() -> None:
    found = judged(*TAKEN, admitted("b"))
    assert found.verdict == "clean: of 2 groups, 0 trained once, 0 ended with a reason, 2 open: the run has not finished"
    assert found.open == {"claimed": 1, "in flight": 1}
    assert judged(*TAKEN, admitted("b"), Ended("b", "dropped/end"), Ended("a", "dropped/end"), Finished()).clean


@pytest.mark.parametrize(
    ("records", "line", "why"),
    [
        ([], 0, "there is no line"),
        ([admitted("a")], 0, "begins with admitted"),
        ([began(), began()], 1, "began again, without a resume"),
        ([*TRAINED, Ended("a", "trained")], 5, "group 'a' has ended before"),
        ([*TRAINED, Claimed("a", 0)], 5, "group 'a' has ended before"),
        ([*TRAINED, admitted("a")], 5, "group 'a' was admitted before"),
        ([began(), admitted("a", 1)], 1, "for weight version 1, and the ledger is at 0"),
        ([began(), admitted("a"), Admitted("b", ("b0", "a1"), 0, None)], 2, "key 'a1', which is not new"),
        ([began(), Admitted("a", (), 0, None)], 1, "no keys"),
        ([began(), stored("a")], 1, "group 'a' was never admitted"),
        ([*HELD, stored("a")], 3, "stored since line 2, not in flight"),
        ([began(), admitted("a"), Stored("a", ("a0",), 0, 0)], 2, "other keys"),
        ([began(), admitted("a"), stored("a", 1, 0)], 2, "last token has weight version 0"),
        ([began(), admitted("a"), Claimed("a", 0)], 2, "in flight since line 1, not stored"),
        ([*HELD, Claimed("a", 1)], 3, "for weight version 1, and the ledger is at 0"),
        ([*HELD, Ended("a", "trained")], 3, "stored since line 2: it cannot end as trained"),
        ([*TAKEN, Claimed("a", 0)], 4, "claimed since line 3, not stored"),
        ([*TAKEN, Released("a"), Ended("a", "trained")], 5, "stored since line 4: it cannot end"),
        ([*HELD, Ended("a", "failed")], 3, "cannot end as failed"),
        ([*HELD, Ended("a", "lost")], 3, "'lost' is no end of a group"),
        ([*HELD, Ended("a", "dropped/")], 3, "'dropped/' is no end"),
        ([*HELD, Cancelled("a", "evicted/too_old")], 3, "stored since line 2, not in flight"),
        ([began(), admitted("a"), Cancelled("a", "failed")], 2, "no reason to cancel"),
        ([began(), admitted("a"), Cancelled("a", "evicted/x"), stored("a")], 3, "cancelled since line 2"),
        ([began(), admitted("a"), Cancelled("a", "evicted/x"), Ended("a", "evicted/y")], 3, "cancelled as evicted/x"),
        ([*HELD, Reissued("a", ("x", "y"), 0, 1)], 3, "stored since line 2, not in flight"),
        ([began(), admitted("a"), Reissued("a", ("x", "y"), 0, 2)], 2, "attempt 2 after 0"),
        ([began(), admitted("a"), Reissued("a", ("x", "a1"), 0, 1)], 2, "key 'a1', which is not new"),
        ([began(), Announced(2), Announced(1)], 2, "weight version 1 after 2"),
        ([*HELD, Announced(2), Claimed("a", 2)], 4, "of weight version 0, at 2: older than the bound of 1"),
        ([began("weight_fifo"), *HELD[1:], Announced(2), Claimed("a", 2)], 4, "older than the bound of 1"),
        ([began("in_order"), admitted("a", 0, 1), stored("a"), Claimed("a", 0)], 3, "it was drawn for 1"),
        ([began("in_order"), admitted("a", 0, 2), stored("a"), Announced(2), Claimed("a", 2)], 4, "older than the bound"),
        ([began(), Cut(1, "c", 0), Cut(0, "d", 0)], 2, "checkpoint 'd' is of step 0, after one of step 1"),
        ([began(), Announced(2), Cut(1, "c", 1)], 2, "checkpoint 'c' at weight version 1, and the ledger is at 2"),
        ([began(), Resumed(1, "c", "")], 1, "resumes after line 1, which is not the cut of checkpoint 'c'"),
        ([began(), Announced(1), Resumed(1, "", "")], 2, "which is not the run's beginning"),
        ([began(), Cut(1, "c", 0), Resumed(5, "c", "")], 2, "line 5, which is not the cut"),
        ([began(), Announced(1), Cut(1, "c", 1), Resumed(2, "c", ""), began()], 4, "the resumed ledger has 1"),
        ([*HELD, Finished()], 3, "finished, and group 'a' is stored since line 2: it was lost"),
        ([began(), Finished(), Announced(1)], 2, "closed before"),
    ],
)  # fmt: skip
def test_the_first_line_that_fails_is_named(records: Sequence[Record | Transition], line: int, why: str) -> None:
    found = judged(*records)
    assert found.problem is not None
    assert (found.problem.line, found.clean) == (line, False)
    assert why in found.problem.why
    more = judged(*records, Ended("nobody", "trained")).problem if records else found.problem
    assert more == found.problem


def test_what_no_sampler_promises_is_not_asked_for() -> None:
    for sampler in ("ready_first", "mine:Sampler"):
        assert judged(began(sampler), *HELD[1:], Announced(9), Claimed("a", 9)).clean


def test_a_resume_may_change_the_settings() -> None:
    found = judged(began(), Announced(1), Cut(1, "c", 1), Resumed(2, "c", "fork"), began("ready_first", version=1), admitted("a", 1))
    assert found.clean, found.verdict
    assert found.began is not None
    assert found.began.sampler == "ready_first"


def test_a_resume_may_go_back_to_what_was_void() -> None:
    """From two checkpoints of one run: after the older one's life, the newer one's line counts again."""
    old, new = Cut(1, "old", 0), Cut(2, "new", 0)
    again = (admitted("b"), Ended("b", "failed"))
    found = judged(began(), old, *HELD[1:], new, Resumed(1, "old", "x"), *again, Resumed(4, "new", "y"), Claimed("a", 0), *again)
    assert found.clean, found.verdict
    assert (found.admitted, found.ends, found.open, found.cuts) == (2, {"failed": 1}, {"claimed": 1}, 2)
    assert [(void.line, void.lines, void.groups) for void in found.voided] == [(5, 3, 1), (8, 3, 1)]


def test_a_checkpoint_knows_the_hash_of_its_line() -> None:
    contents = parse(written([*TRAINED, Cut(1, "c", 0)]))
    assert audit(contents, [(5, contents.hashes[5])]).clean
    other = audit(parse(written([*TRAINED[:-1], Ended("a", "dropped/x"), Cut(1, "c", 0)])), [(5, contents.hashes[5])])
    assert other.problem is not None
    assert (other.problem.line, "with another hash" in other.problem.why) == (5, True)
    short = audit(parse(written(TRAINED)), [(5, contents.hashes[5])])
    assert short.problem is not None
    assert (short.problem.line, "knows its line 5" in short.problem.why) == (5, True)


@settings(deadline=None, max_examples=100)
@given(seed=SEEDS, sampler=st.sampled_from(SAMPLERS), age=st.integers(0, 3), finishes=st.booleans())
def test_every_life_of_the_ledger_is_clean(seed: int, sampler: str, age: int, finishes: bool) -> None:
    records = life(seed, sampler, max_age=age, turns=80, finishes=finishes)
    found = judged(*records)
    assert found.clean, found.verdict
    assert found.finished == finishes
    assert found.admitted == sum(found.ends.values()) + sum(found.open.values())
    assert not finishes or not found.open
    assert len(found.voided) == sum(isinstance(record, Resumed) for record in records)


@settings(deadline=None, max_examples=150)
@given(seed=SEEDS, sampler=st.sampled_from(SAMPLERS), how=st.sampled_from(["swap", "delete", "double", "edit", "edit and hash"]))
def test_a_line_that_was_changed_in_the_file_is_found(seed: int, sampler: str, how: str) -> None:
    """However it was; but the end of the journal may be missing, and its last line, which no other fixes, be another one."""
    luck = Random(seed)
    lines = written(life(seed, sampler)).splitlines(keepends=True)
    n = luck.randrange(len(lines))
    last = n == len(lines) - 1
    changed = list(lines)
    match how:
        case "swap":
            n, other = sorted((n, luck.randrange(len(lines))))
            changed[n], changed[other] = lines[other], lines[n]
        case "delete":
            del changed[n]
        case "double":
            changed.insert(n, lines[n])
            n += 1
        case _:
            changed[n] = _edited(lines[n], luck, hashed=how == "edit and hash")
    found = audit(parse(b"".join(changed)))
    if changed == lines or (last and how in ("delete", "edit and hash")):
        return
    assert found.problem is not None
    assert found.problem.line in (n, n + (how == "edit and hash"))


def _edited(line: bytes, luck: Random, *, hashed: bool) -> bytes:
    """One field has another value of its type."""
    fields = json.loads(line)
    digest = fields.pop("hash")
    name = luck.choice([name for name in fields if name not in ("n", "kind")])
    fields[name] = _other(fields[name])
    body = json.dumps(fields, separators=(",", ":"))[:-1]
    if hashed:
        digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},"hash":"{digest}"}}\n'.encode()


def _other(value: Any) -> Any:
    match value:
        case str():
            return f"{value}x"
        case list():
            return value[1:]
        case None:
            return 3
    return value + 1


# A group's life as one word: Admitted, Stored, cancelled X, Claimed, Back; its end: trained, failed, evicted, dropped, z at the run's end.
LIFE = re.compile(r"A(f|X?[ez]?|S(CB)*(C?[edz]?|Ct))")


@settings(deadline=None, max_examples=200)
@given(seed=SEEDS, sampler=st.sampled_from(SAMPLERS), how=st.sampled_from(["swap", "delete", "double", "edit"]))
def test_a_forged_chain_must_tell_a_legal_life(seed: int, sampler: str, how: str) -> None:
    """Who rewrites all hashes after a change can only write what another run might have been: shown by a second, independent rule."""
    luck = Random(seed)
    forged: list[Any] = [line.record for line in parse(written(life(seed, sampler, turns=30, resumes=False))).lines]
    n = luck.randrange(1, len(forged)) if len(forged) > 1 else 0
    match how:
        case "swap":
            other = luck.randrange(len(forged))
            forged[n], forged[other] = forged[other], forged[n]
        case "delete":
            del forged[n]
        case "double":
            forged.insert(n, forged[n])
        case "edit":
            values = {name: value for name, value in vars(forged[n]).items() if value is not None}
            if values:
                name = luck.choice(sorted(values))
                forged[n] = replace(forged[n], **{name: tuple(_other(list(values[name]))) if name == "keys" else _other(values[name])})
    found = judged(*forged)
    if found.clean:
        _prove(forged)


def _prove(records: list[Any]) -> None:
    settings_, lives, start, trained = records[0], defaultdict(str), {}, []  # type: ignore[var-annotated]
    assert isinstance(settings_, Began)
    letters = {Admitted: "A", Stored: "S", Cancelled: "X", Claimed: "C", Released: "B"}
    version, keys = settings_.version, []
    for record in records[1:]:
        match record:
            case Announced(new):
                assert new > version
                version = new
            case Ended(uid, how):
                lives[uid] += "z" if how == "dropped/end" else how[0]
                trained += [uid] * (how == "trained")
            case Cut() | Finished():
                continue
            case _:
                lives[record.uid] += letters[type(record)]
        match record:
            case Admitted(uid, minted, at):
                assert at == version
                keys += minted
            case Stored(uid, _, first, _):
                start[uid] = first
            case Claimed(uid, at):
                assert at == version
                assert settings_.sampler == "ready_first" or at - start[uid] <= settings_.max_age
    assert len(set(trained)) == len(trained)
    assert len(set(keys)) == len(keys)
    ends = "tfedz" if any(isinstance(record, Finished) for record in records) else ""
    for uid, word in lives.items():
        assert LIFE.fullmatch(word), (uid, word)
        assert not ends or word[-1] in ends, (uid, word)
