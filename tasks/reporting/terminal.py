"""What a person sees in the terminal while a run goes.

    a terminal                                                   anything else (a file, a pipe, a log)
    ✓ starting Ray  5.2 s                                        starting Ray ...
    ⠋ starting the actors  31.0 s                                starting Ray: done in 5.2 s
    step 12/60 ━━━━━━━━ reward 0.532 accuracy 0.410 ... ETA 1:20   step 12/60  reward 0.532  accuracy 0.410  ...  ETA 1:20

One line is animated, at the bottom; whatever else is printed through Python meanwhile appears above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tasks.reporting.text import ascii_absent, clock, duration, number
from tasks.reporting.views import Column

_SHORTEST_BAR, _LONGEST_BAR = 6, 30


class Progress:
    """One line at the bottom of a terminal, or plain lines where there is none. Use as a context manager.

    Args:
        columns: what to show of a step, besides tokens per second.
        console: where to write; default: standard output.
        now: a clock in seconds.
    """

    def __init__(self, columns: Sequence[Column], console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._total, self._columns, self._now = 0, columns, now
        self._console = console or Console()
        # Not console.is_terminal: FORCE_COLOR makes that true for a file as well.
        self._animated = self._console.is_interactive and self._console.file.isatty()
        self._ticks = ("+", "x") if self._console.options.ascii_only else ("✓", "✗")
        self._spinner = Spinner("line" if self._console.options.ascii_only else "dots")
        self._bar = ProgressBar(total=0, completed=0, complete_style="cyan", finished_style="green")
        self._phase: tuple[str, float] | None = None  # what happens now, and since when
        self._step = 0
        self._known: dict[str, float] = {}
        self._began: tuple[float, int] | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._animated:
            # transient: the last frame would otherwise stay half-way in a traceback.
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._step:
                self._print(Text(f"step {self._step}/{self._total}  {self._values(self._known)}"))

    def begin(self, total_steps: int) -> None:
        """The run is to have this many steps."""
        self._total = total_steps
        self._bar.update(total=total_steps, completed=0)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show `text` with the seconds since it began; at the end, a tick (or a cross when the block raised) and the time taken."""
        outer, started = self._phase, self._now()
        self._phase = text, started
        if not self._animated:
            self._plain(f"{text} ...")
        done = False
        try:
            yield
            done = True
        finally:
            self._phase = outer
            self._close(text, duration(self._now() - started), done)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done, with these metrics. A terminal keeps showing the last known value of each.

        May be called again for the same step with what came later (its validation), and for step 0.
        """
        now = self._now()
        if self._began is None and step > 0:
            self._began = (now - metrics.get("time/step", 0.0), step - 1)
        self._step = step
        self._known |= metrics
        if self._animated:
            self._bar.update(completed=step)
        else:
            self._plain(f"step {step}/{self._total}  {self._values(metrics)}  ETA {self._eta(now)}")

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._animated:
            self._print(Text(text))
        else:
            self._plain(text)

    def report(self, path: Path) -> None:
        """The report is written."""
        self.note(f"report: {path}")

    def _close(self, text: str, taken: str, done: bool) -> None:
        if self._live is not None:
            self._live.refresh()  # else the old frame stays under the tick until the next one
            tick = Text(f"{self._ticks[0]} ", "green") if done else Text(f"{self._ticks[1]} ", "red")
            self._print(tick.append(text, "default").append(f"  {taken}", "dim default"))
        else:
            self._plain(f"{text}: {'done in' if done else 'failed after'} {taken}")

    def _render(self) -> RenderableType:
        """The animated line: the innermost phase, else the bar. Exactly one line, however narrow the terminal."""
        now = self._now()
        if self._phase is not None:
            text, started = self._phase
            return _one_line(self._spinner, Text(text).append(f"  {duration(now - started)}", "dim"))
        if not self._known:
            return Text()
        head, tail = f"step {self._step}/{self._total}", f"{self._values(self._known, ' ')} ETA {self._eta(now)}"
        room = self._console.width - len(head) - len(tail) - 2
        if room < _SHORTEST_BAR:
            return _one_line(Text(f"{head} {tail}"))
        self._bar.width = min(room, _LONGEST_BAR)
        return _one_line(Text(head), self._bar, Text(tail))

    def _values(self, metrics: Mapping[str, float], gap: str = "  ") -> str:
        shown = [f"{one.heading} {one.show(metrics)}" for one in self._columns if one.has(metrics)]
        if "tokens_per_s" in metrics:
            shown.append(f"{number(metrics['tokens_per_s'])} tok/s")
        return ascii_absent(gap.join(shown))

    def _eta(self, now: float) -> str:
        if self._began is None or self._step <= self._began[1]:
            return "-"
        began, first = self._began
        return clock((now - began) / (self._step - first) * (self._total - self._step))

    def _print(self, text: Text) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _plain(self, text: str) -> None:
        # Past rich: it would wrap at 80 columns and, told to (FORCE_COLOR), colour a file.
        print(text, file=self._console.file, flush=True)


def _one_line(*parts: RenderableType) -> Table:
    line = Table.grid(padding=(0, 1))
    for _ in parts:
        line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(*parts)
    return line
