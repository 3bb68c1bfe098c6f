"""BlockData, what a storage unit keeps, against a dictionary; and the records that say what a partition is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

from actors.data_plane.codec import ColumnType, Layout
from actors.data_plane.schema import Schema
from actors.data_plane.transfer_queue.records import Record, schema_key, type_key
from actors.data_plane.transfer_queue.storage import Block, BlockData, numbers, parse

INDEXES = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), INDEXES, st.sampled_from(["x", "y"]), st.lists(st.integers(0, 40), min_size=6, max_size=6)),
        st.tuples(st.just("clear"), INDEXES),
        st.tuples(st.just("get"), INDEXES, st.sampled_from(["x", "y"])),
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_any_history_agrees_with_a_dictionary(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    data, expected = BlockData(), dict[tuple[str, int], bytes]()
    for count, step in enumerate(steps):
        match step:
            case "put", indexes, column, lengths:
                rows = [bytes([count, index]) * length for index, length in zip(indexes, lengths, strict=False)]
                packed = torch.frombuffer(bytearray(b"".join(rows)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, rows))]
                data.put_data({column: [packed, numbers([len(row) for row in rows])]}, indexes)
                expected |= {(column, index): row for index, row in zip(indexes, rows, strict=False)}
            case "clear", indexes:
                data.clear(indexes)
                expected = {place: row for place, row in expected.items() if place[1] not in indexes}
            case "get", indexes, column:
                if not all((column, index) in expected for index in indexes):
                    with pytest.raises(StorageKeyNotFoundError):
                        data.get_data([column], indexes)
                    continue
                packed, lengths = data.get_data([column], indexes)[column]
                rows = [expected[column, index] for index in indexes]
                assert packed.numpy().tobytes() == b"".join(rows)
                assert list(parse(lengths)) == [len(row) for row in rows]
        blocks = {block for column in data.field_data.values() for block in column.values()}
        assert sum(len(block.data) for block in blocks) <= 2 * sum(map(len, expected.values())), "cleared rows give memory back"
        assert data.active_key_count >= len({index for _, index in expected})


def test_rows_asked_for_in_order_are_not_copied() -> None:
    data, packed = BlockData(), torch.arange(12, dtype=torch.uint8)
    data.put_data({"x": [packed, numbers([4, 4, 4])]}, [7, 3, 5])
    assert data.get_data(["x"], [7, 3, 5])["x"][0].data_ptr() == packed.data_ptr()
    assert data.get_data(["x"], [3, 5])["x"][0].data_ptr() == packed.data_ptr() + 4
    assert data.get_data(["x"], [5, 7])["x"][0].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


def test_dropping_rows_one_by_one_copies_few_times() -> None:
    block, copies = Block(torch.zeros(1024, dtype=torch.uint8), {index: index for index in range(1024)}, [1] * 1024), set()
    for index in range(1023):
        block.drop([index])
        copies.add(block.data.data_ptr())
    assert len(block.data) <= 2
    assert len(copies) <= 12


def test_the_first_key_decides() -> None:
    first, second = Schema(frozenset({"x", "b", "a"}), 4, frozenset({"train"})), Schema(frozenset({"z"}))
    long, real = ColumnType(Layout.VECTOR, "int64"), ColumnType(Layout.SCALAR, "float32")
    assert Record.parse([]) is None
    assert Record.parse([type_key("x", long)]) is None
    keys = [schema_key(first), schema_key(second), type_key("b", real), type_key("x", long), type_key("a", long), type_key("b", long)]
    assert Record.parse(keys) == Record(first, {"b": real, "x": long, "a": long})
    assert [first.mask([name]) for name in ("a", "b", "x", "unknown")] == [1, 2, 4, 0]
    assert first.mask(["x", "a"]) == 5
