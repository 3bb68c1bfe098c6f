"""The journal's file: it goes on where it ended, whoever died, and says where it was changed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.rollout.audit import audit
from actors.rollout.journal import Began, Cut, Finished, Journal, JournalError, Opening, Resumed, Stored, as_record, parse
from actors.rollout.transitions import Admitted, Announced, Claimed, Committed, Ended, Reissued, Released
from flows.audit import as_json, as_text
from tasks.audit import as_markdown
from tests.actors.rollout.journals import began, life, meta_of, written

ADMITTED = Admitted("a", ("a0", "a1"), 0, None)
TWO_CUTS = [
    began(), ADMITTED, Cut(1, "one", 0), Announced(1), Reissued("a", ("b0", "b1"), 1, 1), Committed("a", meta_of(("b0", "b1")), 1, 1),
    Claimed("a", 1), Released("a"), Cut(2, "two", 1), Announced(2), Ended("a", "evicted/too_old"), Finished(),
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_lines_are_written_as_they_are_read(path: Path) -> None:
    journal = Journal.open(path, clock=lambda: 12.0006)
    journal.append(*TWO_CUTS[:5])
    journal.record([TWO_CUTS[5]])  # type: ignore[list-item]
    journal.append(*TWO_CUTS[6:])
    contents = parse(path.read_bytes())
    assert [line.record for line in contents.lines] == [as_record(record) for record in TWO_CUTS]
    assert contents.lines[5].record == Stored("a", ("b0", "b1"), 1, 1)
    assert (contents.damage, contents.torn, len(journal)) == (None, 0, len(TWO_CUTS))
    assert journal.head == (len(TWO_CUTS) - 1, contents.hashes[-1])
    first = json.loads(path.read_bytes().splitlines()[0])
    assert first == {
        "n": 0, "time": 12.001, "kind": "began", "run": "run-1", "config": "digest", "sampler": "windowed", "max_age": 1,
        "groups_per_step": 2, "version": 0, "prev": "", "hash": contents.hashes[0],
    }  # fmt: skip


def test_a_line_torn_at_any_byte_is_cut_off_and_the_journal_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them take their time
    whole = written(TWO_CUTS[:4])
    starts = [0, *(n + 1 for n, byte in enumerate(whole) if byte == 10)]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        journal = Journal.open(path, clock=lambda: 1.0)
        kept = max(start for start in starts if start <= length)
        assert (journal.torn, len(journal)) == (length - kept, starts.index(kept))
        journal.append(Announced(9))
        journal.close()
        contents = parse(path.read_bytes())
        assert (contents.damage, contents.torn, len(contents.lines)) == (None, 0, starts.index(kept) + 1)


def test_a_changed_line_is_named(path: Path) -> None:
    lines = written(TWO_CUTS).splitlines(keepends=True)
    other = written([began("in_order"), ADMITTED]).splitlines(keepends=True)[1]
    for damaged, line, why in (
        ([*lines[:2], lines[3]], 2, "its number is 3: lines are missing"),
        ([lines[0], lines[1].replace(b'"a0"', b'"c0"')], 1, "its hash is not that of its text"),
        ([*lines[:3], b"\n"], 3, "it is no line of a journal"),
        ([lines[0].replace(b'"began"', b'"gone"')], 0, "unknown kind 'gone'"),
        ([lines[0].replace(b'"version":0', b'"version":"x"')], 0, "began: version: Input should be a valid integer"),
        (
            [lines[0], other],
            1,
            "does not follow",
        ),
        ([lines[0].replace(b'"time":', b'"time": ')], 0, "its hash"),
        ([lines[0].replace(b'"time":0.0', b'"time":NaN')], 0, "a value that no journal holds"),
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(JournalError) as error:
            Journal.open(path)
        assert f"{path}, line {line}: " in str(error.value)
        assert why in str(error.value)
        assert path.read_bytes() == b"".join(damaged)  # as evidence


def test_a_run_goes_on_from_the_cut_that_its_checkpoint_names(path: Path) -> None:
    journal = Journal.open(path)
    journal.begin(Opening(path, "run-1", "digest"), began())
    one = journal.cut(1, "one", 0)
    assert one == journal.head == (1, parse(path.read_bytes()).hashes[1])
    journal.append(Announced(1))
    two = journal.cut(2, "two", 1)
    journal.close()
    for back, why in ((one, "the collector died"), (two, "from the newer one"), (None, "from the start")):
        journal = Journal.open(path)
        journal.begin(Opening(path, "run-2", "other", back, why), Began("run-2", "other", "ready_first", 9, 2, 0))
        journal.close()
    contents = parse(path.read_bytes())
    assert [line.record for line in contents.lines[4:]] == [
        Resumed(1, "one", "the collector died"), Began("run-2", "other", "ready_first", 9, 2, 0),
        Resumed(3, "two", "from the newer one"), Began("run-2", "other", "ready_first", 9, 2, 1),
        Resumed(0, "", "from the start"), Began("run-2", "other", "ready_first", 9, 2, 0),
    ]  # fmt: skip
    assert audit(contents).clean


def test_a_checkpoint_of_another_journal_is_refused(path: Path) -> None:
    path.write_bytes(written(TWO_CUTS))
    journal = Journal.open(path)
    for back, why in (((1, "0"), "after line 1, which is not here"), ((2, "0"), "after line 2, which is another one here")):
        with pytest.raises(JournalError, match=why):
            journal.begin(Opening(path, "run", "", back), began())
    journal.close()
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="after line 2, which is not here"):
        Journal.open(path).begin(Opening(path, "run", "", (2, "0")), began())


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**20), reopens=st.booleans())
def test_the_segments_are_the_journal_up_to_its_newest_cut(path: Path, seed: int, reopens: bool) -> None:
    path.unlink(missing_ok=True)
    journal, since, segments = Journal.open(path), 0, b""
    for record in life(seed, "windowed"):
        journal.append(record)
        if reopens:
            journal.close()
            journal = Journal.open(path)
        if isinstance(record, Cut):
            segments += journal.segment(since)
            since = len(journal)
            assert segments == path.read_bytes()
        assert journal.segment(since) == b""
    assert journal.segment(0) == segments
    journal.close()


def test_a_segment_begins_behind_a_cut(path: Path) -> None:
    journal = Journal.open(path)
    journal.append(*TWO_CUTS)
    assert journal.segment(3).count(b"\n") == 6
    with pytest.raises(JournalError, match="no segment begins at line 4"):
        journal.segment(4)


def test_one_process_writes(path: Path) -> None:
    journal = Journal.open(path)
    with pytest.raises(JournalError, match=r"journal\.jsonl: another process writes it"):
        Journal.open(path)
    journal.close()
    journal.close()
    Journal.open(path).close()
    with pytest.raises(JournalError, match="it was closed"):
        journal.append(began())


def test_a_full_disk_ends_the_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path)
    journal.append(began())
    good, real = path.read_bytes(), os.write

    def full(descriptor: int, text: bytes) -> int:
        if len(text) < 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, text[: len(text) - 150])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(JournalError, match=r"line 1: it could not be written .*No space left"):
            journal.append(ADMITTED)
    with pytest.raises(JournalError, match="No space left"):
        journal.append(ADMITTED)
    journal.close()
    assert len(path.read_bytes()) > len(good)
    assert len(Journal.open(path)) == 1
    assert path.read_bytes() == good


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in tmp_path, tmp_path / "none" / "journal.jsonl":
        with pytest.raises(JournalError, match=str(path)):
            Journal.open(path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("n", "time", "kind", "uid", "keys", "version", "prev", "hash", "how", "after")
KINDS = ("began", "admitted", "committed", "claimed", "ended", "cut", "resumed", "finished")
LINES = st.dictionaries(st.sampled_from(FIELDS), JUNK | st.sampled_from([0, "", *KINDS]), max_size=8).map(json.dumps).map(str.encode)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.lists(LINES, max_size=3).map(lambda lines: b"\n".join([*lines, b""])))
def test_arbitrary_bytes_are_refused_by_name(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = audit(parse(content))
    assert not found.clean
    assert as_text(found, "x").isascii()
    assert as_markdown(found)
    assert json.dumps(as_json(found))
    if b"\n" not in content:  # one torn line
        Journal.open(path).close()
        return
    with pytest.raises(JournalError) as error:
        Journal.open(path)
    assert f"{path}, line 0: " in str(error.value)


def test_values_nested_deeply_are_refused(path: Path) -> None:
    for text in (b"[" * 100_000, b'{"kind":"began","n":' + b"[" * 900 + b"]" * 900 + b"}", b'{"kind":"began","n":' + b"9" * 5000 + b"}"):
        assert parse(text + b"\n").damage is not None
