"""Who may spin while it waits, and that both ways give the same values: the executors' tests go through them."""

import pytest

from actors.policy import channels


@pytest.mark.parametrize(
    ("readers", "cores", "spins"), [(2, 2, False), (2, 7, False), (2, 8, True), (5, 13, False), (5, 16, True), (9, 16, False)]
)
def test_processes_spin_where_as_many_cores_are_left_to_others(readers: int, cores: int, spins: bool) -> None:
    assert channels.has_idle_cores(readers, cores) == spins


def test_a_process_waits_as_it_was_told_last() -> None:
    try:
        channels.wait_by(spinning=True)
        assert channels.Channel.read is channels._ask
    finally:
        channels.wait_by(spinning=False)
    assert channels.Channel.read is channels._read
