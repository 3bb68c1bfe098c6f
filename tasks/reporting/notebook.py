"""What a person sees of a run in a notebook: one output that is written anew as the run goes, and the report below it at the end.

step 12/60 ▓▓▓▓▓▓░░░░░░░░ ETA 1:20         the phase while the run starts
| step | reward | accuracy | ... | tok/s |  the newest steps
▸ 14 notes
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tasks.reporting.terminal import Progress
from tasks.reporting.text import duration, number
from tasks.reporting.views import Column

_ROWS, _NOTES = 12, 200
_HEIGHT_PX = 720  # of the report


def shell() -> Any:
    """IPython's shell when this process is a notebook's kernel; else None."""
    module = sys.modules.get("IPython")
    found = module.get_ipython() if module else None
    return found if found is not None and hasattr(found, "kernel") else None


def progress(columns: Sequence[Column]) -> Progress:
    """For where this process runs: a terminal, a file, a notebook."""
    if shell() is None:
        return Progress(columns)
    from IPython.display import display

    handle = display(_data(""), raw=True, display_id=True)
    return NotebookProgress(columns, lambda html: handle.update(_data(html), raw=True), lambda html: display(_data(html), raw=True))


def _data(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": "(HTML)"}


class NotebookProgress(Progress):
    """As `Progress`, in HTML.

    Args:
        update: writes the output anew. add: another output, below it.
    """

    def __init__(self, columns: Sequence[Column], update: Callable[[str], None], add: Callable[[str], None]) -> None:
        super().__init__(columns)
        self._update, self._add = update, add
        self._rows: dict[int, dict[str, float]] = {}
        self._notes: list[str] = []
        self._lock = threading.Lock()  # trackers write notes, too

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._show()

    def begin(self, total_steps: int) -> None:
        super().begin(total_steps)
        self._show()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        with super().phase(text):
            self._show()
            yield

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.setdefault(step, {}).update(metrics)
        while len(self._rows) > _ROWS:
            del self._rows[min(self._rows)]
        super().step(step, metrics)
        self._show()

    def note(self, text: str) -> None:
        with self._lock:
            self._notes = [*self._notes, text][-_NOTES:]
        self._show()

    def report(self, path: Path) -> None:
        # Its own document, without this page's cookies and storage: it holds what a model said.
        page = escape(path.read_text(encoding="utf-8"), quote=True)
        self._add(f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width:100%;height:{_HEIGHT_PX}px;border:0"></iframe>')

    def _close(self, text: str, taken: str, done: bool) -> None:
        self.note(f"{'✓' if done else '✗'} {text}  {taken}")

    def _plain(self, text: str) -> None:
        """No lines: `_show` has it all."""

    def _show(self) -> None:
        with self._lock:
            self._update(f"<div>{self._head()}{self._table()}{self._list()}</div>")

    def _head(self) -> str:
        now = self._now()
        bar = f'<progress max="{max(self._total, 1)}" value="{self._step}"></progress>' if self._total else ""
        steps = f"step {self._step}/{self._total} {bar} ETA {self._eta(now)}" if self._total else ""
        phase = ""
        if self._phase is not None:
            text, started = self._phase
            phase = f" <em>{escape(text)} ... {duration(now - started)}</em>"
        return f"<div>{steps}{phase}</div>"

    def _table(self) -> str:
        shown = [one for one in self._columns if any(one.has(row) for row in self._rows.values())]
        heads = ["step", *(escape(one.heading) for one in shown), "tok/s"]
        lines = [
            [str(step), *(escape(one.show(row)) if one.has(row) else "" for one in shown), number(row.get("tokens_per_s"))]
            for step, row in sorted(self._rows.items(), reverse=True)
        ]
        if not lines:
            return ""
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
        return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{body}</table>"

    def _list(self) -> str:
        if not self._notes:
            return ""
        return f"<details><summary>{len(self._notes)} notes</summary><pre>{escape(chr(10).join(self._notes))}</pre></details>"
