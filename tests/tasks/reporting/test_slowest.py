import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.slowest import SlowestWriter, failures, slow_row, slowest_first, slowest_rows
from tests.tasks.reporting.runs import Slow

ODD = "a\nb\r\n\u2028c\x85d\x00 \udc80 <script>"


def test_read_gives_what_was_written(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    with SlowestWriter(directory) as slowest:
        slowest.write(1, "train", [Slow(ODD, "math", 10.0, "timed_out", ODD), Slow("b", "exact", math.nan)])
        slowest.write(2, "validation", [])
    slowest.close()
    assert directory.slowest.read_bytes().count(b"\n") == 2
    assert read_lines(directory.slowest) == [
        {"step": 1, "phase": "train", "uid": ODD, "label": "math", "seconds": 10.0, "outcome": "timed_out", "error": ODD},
        {"step": 1, "phase": "train", "uid": "b", "label": "exact", "seconds": 0.0, "outcome": "scored", "error": ""},
    ]


LINES = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.builds(
            Slow,
            st.sampled_from("xyz"),
            st.sampled_from("ab"),
            st.floats(0, 9),
            st.sampled_from(["scored", "failed"]),
            st.sampled_from(["", "e"]),
        ),
    ),
    max_size=30,
)


@given(LINES, st.integers(0, 8))
def test_the_slowest_and_the_commonest_come_first(lines: list[tuple[int, Slow]], count: int) -> None:
    rows = [slow_row(step, "train", one) for step, one in lines]
    assert [row["seconds"] for row in slowest_first(rows, count)] == sorted((one.seconds for _, one in lines), reverse=True)[:count]
    found = failures(rows, 1000)
    assert sum(one.count for one in found) == sum(one.outcome == "failed" for _, one in lines)
    assert [one.count for one in found] == sorted((one.count for one in found), reverse=True)
    for one in found:
        first = next(row for row in rows if (row["label"], row["outcome"], row["error"]) == (one.label, one.outcome, one.error))
        assert (one.step, one.uid) == (first["step"], first["uid"])
    assert failures(rows, count) == found[:count]


def test_rows_for_the_prefect_ui() -> None:
    rows = slowest_rows(
        [slow_row(3, "train", Slow("gsm8k:1", "math", 10.0, "timed_out", "no\x1b answer")), slow_row(4, "after", Slow("x", "exact", 70.0))]
    )
    assert rows == [
        {"step": "4", "phase": "after", "problem": "x", "reward": "exact", "took": "1 min 10 s", "outcome": "scored", "error": ""},
        {
            "step": "3",
            "phase": "train",
            "problem": "gsm8k:1",
            "reward": "math",
            "took": "10.0 s",
            "outcome": "timed out",
            "error": "no\\x1b answer",
        },
    ]
