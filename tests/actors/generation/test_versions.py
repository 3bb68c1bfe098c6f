"""Which version a token counts to, by property."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from actors.generation.versions import TokenVersions

# What happens, in order of time: a number of tokens of a step, or None for an update.
EVENTS = st.lists(st.one_of(st.integers(0, 4), st.none()), max_size=40)


@given(EVENTS, st.randoms())
def test_each_token_counts_to_the_weights_of_its_step_however_late_it_is_seen(events: list[int | None], random: object) -> None:
    versions, late, expected, version = TokenVersions(), [], [], 0
    for at, event in enumerate(events):
        if event is None:
            version += 1
            versions.loaded(version, float(at))
        else:
            expected += [version] * event
            late.append((event, float(at)))
        while late and random.random() < 0.5:  # type: ignore[attr-defined]  # outputs arrive in order, but behind the updates
            versions.sampled("a", *late.pop(0))
    for count, at_time in late:
        versions.sampled("a", count, at_time)
    segments = versions.pop("a")
    assert [v for v, count in segments for _ in range(count)] == expected
    assert all(count > 0 for _, count in segments)
    assert all(one[0] != two[0] for one, two in itertools.pairwise(segments))
    assert versions.current == version
    assert versions.pop("a") == ()


def test_requests_are_kept_apart() -> None:
    versions = TokenVersions()
    versions.sampled("a", 2, 1.0)
    versions.loaded(7, 2.0)
    versions.sampled("a", 1, 2.0)
    versions.sampled("b", 1, 3.0)
    assert versions.pop("a") == ((0, 2), (7, 1))
    assert versions.pop("b") == ((7, 1),)
