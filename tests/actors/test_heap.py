import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from actors.heap import freeze_heap
from tests.conftest import ROOT


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
    found = weakref.ref(cycle)
    del cycle
    freeze_heap()
    assert found() is not None


def test_a_second_call_leaves_no_fewer_frozen() -> None:
    """In a process of its own: here other threads' objects end meanwhile, by their reference count."""
    code = """
import gc
from actors.heap import freeze_heap
freeze_heap()
frozen = gc.get_freeze_count()
freeze_heap()
assert gc.get_freeze_count() >= frozen > 0
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
