import gc
import weakref
from collections.abc import Iterator

import pytest

from actors.heap import freeze_heap


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_collections_leave_alone_what_was_there() -> None:
    before = Cycle()
    freeze_heap()
    after = Cycle()
    frozen, later = weakref.ref(before), weakref.ref(after)
    del before, after
    gc.collect()
    assert frozen() is not None
    assert later() is None


def test_a_second_call_leaves_alone_what_the_first_has_frozen() -> None:
    """A fork's server has called first, with a million objects."""
    cycle = Cycle()
    freeze_heap()
    frozen, found = gc.get_freeze_count(), weakref.ref(cycle)
    del cycle
    freeze_heap()
    assert found() is not None
    assert gc.get_freeze_count() > 0.99 * frozen  # a thread's may have ended by their reference count
