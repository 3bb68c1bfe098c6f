"""Usage records: percentiles against numpy's, and merging equals recording everything in one place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data_plane.usage import OperationUsage, flatten, merge

SECONDS = st.floats(1e-6, 1e4)
CALLS = st.lists(st.tuples(st.sampled_from(["put", "get"]), st.integers(0, 100), st.integers(0, 10**9), SECONDS), max_size=20)


@given(values=st.lists(SECONDS, min_size=1, max_size=200), q=st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_within_its_bucket(values: list[float], q: float) -> None:
    usage = OperationUsage()
    for value in values:
        usage.add(1, 1, value)
    assert usage.quantile(q) == pytest.approx(np.quantile(values, q, method="inverted_cdf"), rel=0.025)


@given(clients=st.lists(CALLS, max_size=4))
def test_merging_equals_one_record(clients: list[list[tuple[str, int, int, float]]]) -> None:
    parts, whole = [], dict[str, OperationUsage]()
    for calls in clients:
        part: dict[str, OperationUsage] = {}
        for name, *numbers in calls:
            for record in (part, whole):
                record.setdefault(name, OperationUsage()).add(*numbers)
        parts.append(part)
    merged = merge(parts)
    assert merged == whole
    assert flatten(merged) == flatten(whole)
    merged.setdefault("put", OperationUsage()).add(1, 1, 1.0)
    assert merge(parts) == whole, "the parts are left alone"


def test_names_are_flat() -> None:
    usage = OperationUsage()
    usage.add(rows=4, payload=100, seconds=0.5)
    flat = flatten({"put": usage, "get": OperationUsage()})
    assert flat["data_plane/put/p50_s"] == flat["data_plane/put/p99_s"] == pytest.approx(0.5, rel=0.025)
    assert flat["data_plane/get/p99_s"] == 0.0
    assert {name.removeprefix("data_plane/put/") for name in flat if "put" in name} == {
        "count", "errors", "rows", "bytes", "p50_s", "p99_s",
    }  # fmt: skip
