"""The buffer between Ray's log stream and the run's log. The stream itself: tests/e2e/test_monitoring.py."""

from tasks.actor_logs import LineBuffer, level


def test_the_newest_lines_are_kept_and_the_others_counted() -> None:
    buffer = LineBuffer(most_lines=2)
    buffer.add("a", ["1", "", "2"])
    buffer.add("b", ["ERROR: x"])
    buffer.add("a", ["Traceback"], stderr=True)
    buffer.add("a", ["3"])
    assert buffer.take() == [
        (30, "[a] ... 1 lines left out; Ray's log directory has all"),
        (20, "[a] 2"),
        (20, "[a] 3"),
        (40, "[b] ERROR: x"),
        (20, "[a] Traceback"),
    ]
    assert buffer.take() == []
    assert [level(line) for line in ("(EngineCore) WARNING 11-21", "no level", "INFO no WARNING")] == [30, 20, 20]
