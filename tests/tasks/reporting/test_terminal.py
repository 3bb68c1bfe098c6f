import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from tasks.reporting.terminal import Progress
from tasks.reporting.views import VIEWS

GRPO = VIEWS["grpo"].line


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def run(progress: Progress, clock: Clock) -> None:
    """A short run as a flow would show it."""
    with progress as shown:
        shown.begin(8)
        with shown.phase("starting vLLM engine"):
            clock.seconds += 31
        with shown.phase("warm start"):
            clock.seconds += 5
        shown.note("[step 0] accuracy 0.250")
        shown.step(0, {"accuracy/validation": 0.25})
        for step in (1, 2):
            clock.seconds += 10
            shown.step(step, {"reward/mean": step / 4, "kl": 0.001, "tokens_per_s": 1234.0, "time/step": 10.0, "loss": 1.0})


PLAIN = [
    "starting vLLM engine ...",
    "starting vLLM engine: done in 31.0 s",
    "warm start ...",
    "warm start: done in 5.0 s",
    "[step 0] accuracy 0.250",
    "step 0/8  accuracy 0.250  ETA -",
    "step 1/8  reward 0.250  KL 0.0010  1,234 tok/s  ETA 1:10",
    "step 2/8  reward 0.500  KL 0.0010  1,234 tok/s  ETA 1:00",
]


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # must not put codes into a file
    clock, file = Clock(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    run(Progress(GRPO, Console(file=file, width=20), clock), clock)
    file.seek(0)
    assert file.read().splitlines() == PLAIN


def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    run(Progress(GRPO, now=clock), clock)
    assert capsys.readouterr().out.splitlines() == PLAIN


def test_a_phase_that_fails_says_so_and_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no port"), Progress(GRPO) as shown, shown.phase("starting Prefect server"):
        raise RuntimeError("no port")
    assert capsys.readouterr().out.splitlines()[-1].startswith("starting Prefect server: failed after 0.")


@contextmanager
def terminal(width: int) -> Iterator[tuple[Console, list[bytes]]]:
    """A console on a real pseudo-terminal, and what was written to it."""
    ours, theirs = os.openpty()
    received: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # Linux's end of file of a pseudo-terminal
                return
            if not data:
                return
            received.append(data)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as file:
        yield Console(file=file, width=width, color_system="standard", _environ={"TERM": "xterm"}), received
    reader.join(10)
    os.close(ours)
    assert not reader.is_alive()


def screen(data: bytes) -> list[str]:
    """The lines that stay on a terminal after these bytes (cursor up, erase line, carriage return, newline)."""
    lines, row, column = [""], 0, 0
    for code, final, char in re.findall(r"\x1b\[([?\d;]*)([A-Za-z])|([\s\S])", data.decode()):
        if final == "A":
            row -= int(code or 1)
        elif final == "K":
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif char:
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [100, 40])
def test_a_terminal_keeps_ticks_and_one_last_line(width: int) -> None:
    clock = Clock()
    with terminal(width) as (console, received):
        run(Progress(GRPO, console, clock), clock)
    data = b"".join(received)
    assert [line for line in screen(data) if line] == [
        "✓ starting vLLM engine  31.0 s",
        "✓ warm start  5.0 s",
        "[step 0] accuracy 0.250",
        "step 2/8  reward 0.500  accuracy 0.250  KL 0.0010  1,234 tok/s",
    ]
    assert data.rindex(b"\x1b[?25h") > data.rindex(b"\x1b[?25l")  # the cursor is visible again


def test_other_output_stays_whole_above_the_line() -> None:
    clock = Clock()
    with terminal(80) as (console, received), Progress(GRPO, console, clock) as shown:
        shown.begin(8)
        for step in range(1, 9):
            shown.step(step, {"reward/mean": 0.5})
            print(f"(raylet) [log] {step}")
            print(f"warning {step}", file=sys.stderr)
        with pytest.raises(KeyError), shown.phase("exporting"):
            raise KeyError
    lines = [line for line in screen(b"".join(received)) if line]
    expected = [line for step in range(1, 9) for line in (f"(raylet) [log] {step}", f"warning {step}")]
    assert lines == [*expected, "✗ exporting  0.0 s", "step 8/8  reward 0.500"]


@pytest.mark.parametrize("width", [10, 30, 60, 80, 200])
def test_the_line_is_one_line_at_every_width(width: int) -> None:
    clock = Clock()
    with terminal(width) as (console, _):
        shown = Progress(GRPO, console, clock)
        shown.begin(1000)
        with shown.phase("a phase whose text is much longer than the terminal is wide " * 3):
            assert len(console.render_lines(shown._render(), pad=False)) == 1
        shown.step(999, {"reward/mean": 0.5, "accuracy/validation": 0.25, "kl": 0.1, "tokens_per_s": 1234567.0})
        (line,) = console.render_lines(shown._render(), pad=False)
        text = "".join(segment.text for segment in line)
        assert len(text) <= width
        assert text.startswith("step 999/1000"[: width - 1])
        assert ("━" in text) == (width >= 100)


def test_a_line_of_an_sft_run_has_its_own_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(VIEWS["sft"].line, now=clock) as shown:
        shown.begin(2)
        shown.step(1, {"loss": 2.5, "grad_norm": 1.0, "tokens_per_s": 1234.0, "time/step": 1.0})
        shown.step(1, {"loss/validation": 2.25})
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2  loss 2.500  1,234 tok/s  ETA 0:01",
        "step 1/2  validation loss 2.250  ETA 0:01",
    ]


def test_intervals_and_responses_without_reward_are_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(GRPO, now=clock) as shown:
        shown.begin(2)
        shown.step(0, {"accuracy/validation": 0.25, "accuracy/validation/low": 0.1875, "accuracy/validation/high": 0.3125})
        shown.step(1, {"reward/mean": 0.5, "scoring/timed_out": 0.0, "scoring/failed": 0.015625})
    assert capsys.readouterr().out.splitlines() == [
        "step 0/2  accuracy 0.250 [0.19, 0.31]  ETA -",
        "step 1/2  reward 0.500  failed 1.6%  ETA 0:00",
    ]
