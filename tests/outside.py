"""Files as they may come from outside: any bytes, any JSON, and ours with one value that is another."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 10**30, 10**400, 1e308])
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["\ud800", "\x00", "../x", ".", "", " "])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5
)
DEEP = [b"[" * 100_000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 900 + b"]" * 900, b"9" * 5000]
BYTES = st.binary(max_size=60) | st.sampled_from(DEEP)


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """The value with one place in it changed, left out, or given twice."""
    value = copy.deepcopy(valid)
    *parents, last = draw(st.sampled_from(places_in(value)))
    within = value
    for name in parents:
        within = within[name]
    match draw(st.sampled_from(["other", "other", "gone", "more"])):
        case "gone":
            del within[last]
        case "more" if isinstance(within, list):
            within.append(within[last])
        case "more":
            within[draw(st.text(max_size=5))] = within[last]
        case _:
            within[last] = draw(JSON)
    return value


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value within a value of JSON's kinds."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for name, item in items for place in places_in(item, (*path, name))]
