"""What is new: every line reaches exactly one promoted model, however files grow, and what is refused says where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.storage import Content
from configs.base import ConfigError
from configs.environment import FieldsConfig
from tasks.retraining.prompts import NewPrompts, find_new, parse, read_files, read_frozen, write
from tests.stores import put

FIELDS = FieldsConfig()


def lines(*names: str) -> bytes:
    return "".join(json.dumps({"prompt": name, "answer": name.upper()}) + "\n" for name in names).encode()


def digests(*names: str) -> set[bytes]:
    return {row.digest for row in parse("frozen", lines(*names), FIELDS)}


def new(files: dict[str, bytes], before: NewPrompts | None = None, frozen: tuple[str, ...] = ()) -> NewPrompts:
    return find_new(files, before.consumed if before else {}, digests(*frozen), FIELDS)


def said(found: NewPrompts) -> list[str]:
    return [json.loads(row.line)["prompt"] for row in found.prompts]


def test_a_file_that_is_not_known_is_new() -> None:
    found = new({"b.jsonl": lines("x"), "a.jsonl": lines("y", "z")})
    assert [json.loads(row.line) for row in found.prompts] == [{"prompt": n, "answer": n.upper()} for n in "yzx"]  # in the order of names
    assert found.files == ("a.jsonl", "b.jsonl")
    assert said(new({"b.jsonl": lines("x"), "a.jsonl": lines("y", "z")}, found)) == []


def test_a_file_that_grew_brings_what_was_added() -> None:
    first = new({"a": lines("x", "y")})
    assert said(new({"a": lines("x", "y", "z")}, first)) == ["z"]


def test_a_file_that_was_rewritten_is_new_again() -> None:
    first = new({"a": lines("x", "y")})
    assert said(new({"a": lines("x", "w", "z")}, first)) == ["x", "w", "z"]
    assert said(new({"a": lines("x")}, first)) == ["x"]  # cut short: another file, too


def test_a_file_that_was_renamed_or_copied_is_not_new() -> None:
    first = new({"a": lines("x", "y")})
    second = new({"b": lines("x", "y"), "a": lines("x", "y")}, first)
    assert said(second) == []
    assert said(new({"b": lines("x", "y", "z")}, second)) == ["z"]


def test_a_file_that_went_away_and_came_back_is_not_new() -> None:
    first = new({"a": lines("x")})
    assert said(new({"a": lines("x")}, new({}, first))) == []


def test_a_last_line_that_is_being_written_waits() -> None:
    whole = lines("x", "y")
    first = new({"a": whole[:-9]})
    assert said(first) == ["x"]
    assert said(new({"a": whole}, first)) == ["y"]


def test_a_last_line_without_its_newline_counts() -> None:
    first = new({"a": lines("x", "y").rstrip()})
    assert said(first) == ["x", "y"]
    assert said(new({"a": lines("x", "y", "z")}, first)) == ["z"]


def test_the_frozen_set_and_repetitions_are_left_out() -> None:
    found = new({"a": lines("x", "y", "x"), "b": lines("y", "z")}, frozen=("z",))
    assert (said(found), found.repeated, found.held_out) == (["x", "y"], 2, 1)
    assert said(new({"a": lines("x", "y", "x"), "b": lines("y", "z")}, found)) == []


@pytest.mark.parametrize(
    "bad",
    [
        b'{"prompt": "q"}\n',
        b'{"prompt": null, "answer": "a"}\n',
        b'{"prompt": "q", "answer": null}\n',
        b"[1]\n",
        b"nonsense\n",
        b'"text"\n',
        b"\xff\xfe\n",
    ],
)
def test_a_damaged_line_is_named_by_its_number_in_the_whole_file(bad: bytes) -> None:
    first = new({"a.jsonl": lines("x", "y")})
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 4: "):
        new({"a.jsonl": lines("x", "y", "z") + bad}, first)


def test_what_is_consumed_reads_back() -> None:
    found = new({"a": lines("x")})
    assert {name: Content.model_validate_json(one.model_dump_json()) for name, one in found.consumed.items()} == found.consumed


NIGHTS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 4), max_size=3),  # lines that each file gains
        st.integers(0, 12),  # bytes of each file's end that are not there yet
        st.booleans(),  # whether the night's model is promoted
    ),
    max_size=8,
)


@given(NIGHTS)
def test_every_line_reaches_exactly_one_promoted_model(nights: list[tuple[dict[str, int], int, bool]]) -> None:
    """Files only grow, and may be read in the middle of a write. A night whose model is not promoted consumes nothing."""
    written: dict[str, bytes] = {}
    consumed: dict[str, Content] = {}
    count, trained = 0, []
    for gains, cut, promoted in [*nights, ({}, 0, True)]:
        for name, gain in gains.items():
            written[name] = written.get(name, b"") + lines(*(f"p{count + i}" for i in range(gain)))
            count += gain
        # A write in progress shows a prefix; but never less than what an earlier night has read.
        seen = {name: text[: max(len(text) - cut, consumed[name].size if name in consumed else 0)] for name, text in written.items()}
        found = find_new(seen, consumed, (), FIELDS)
        assert not set(said(found)) & set(trained)
        if promoted:
            trained += said(found)
            consumed = dict(found.consumed)
    assert sorted(trained) == sorted(f"p{i}" for i in range(count))


def test_files_are_found_below_the_url(url: str) -> None:
    put(f"{url}/a.jsonl", lines("x"))
    put(f"{url}/deep/b.jsonl", lines("y"))
    for name in ("notes.txt", ".hidden.jsonl", "_tmp/c.jsonl"):
        put(f"{url}/{name}", b"not read")
    assert read_files(url) == {"a.jsonl": lines("x"), "deep/b.jsonl": lines("y")}
    assert read_files(f"{url}/a.jsonl") == {"a.jsonl": lines("x")}
    assert read_frozen(f"{url}/a.jsonl", FIELDS) == parse("a", lines("x"), FIELDS)


def test_nothing_at_the_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.url: nothing is at .*place|data\.url: nothing is at memory"):
        read_files(url)
    with pytest.raises(ConfigError, match=r"frozen_set\.url: nothing is at .*frozen\.jsonl"):
        read_frozen(f"{url}/frozen.jsonl", FIELDS)


@pytest.mark.parametrize("bad", ["gs://bucket/new", "ftp://127.0.0.1:1/new", "nosuch://x"])
def test_a_url_that_cannot_be_reached(bad: str) -> None:
    """No client is installed for the first, nothing listens at the second, and the third is no kind of URL."""
    with pytest.raises(
        ConfigError, match=rf"^data\.url: cannot reach {bad}: \w+(Error: | package gcsfs is not installed: pip install gcsfs==)"
    ) as caught:
        read_files(bad)
    assert len(str(caught.value).splitlines()) == 1


def test_an_empty_frozen_set(url: str) -> None:
    put(f"{url}/frozen.jsonl", b"\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_frozen(f"{url}/frozen.jsonl", FIELDS)


def test_lines_read_back_with_all_their_columns() -> None:
    rows = [{"prompt": 'a\n"b"\u2028', "answer": "é", "level": [1, {"deep": None}]}, {"prompt": "x", "answer": 3}]
    content = b"\xef\xbb\xbf" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    assert [json.loads(line) for line in write(parse("f", content, FIELDS)).splitlines()] == rows


def test_fields_of_another_name() -> None:
    content = json.dumps({"q": [{"role": "user", "content": "x"}], "info": {"truth": "1"}}).encode()
    (row,) = parse("f", content, FieldsConfig(prompt="q", answer="info.truth"))
    assert row.digest in digests("x")
