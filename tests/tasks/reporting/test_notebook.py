"""The progress of a run in a notebook, as HTML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tasks.reporting import notebook
from tasks.reporting.notebook import NotebookProgress
from tasks.reporting.terminal import Progress
from tasks.reporting.views import VIEWS
from tests.tasks.reporting.runs import step_metrics


def test_a_terminal_is_no_notebook() -> None:
    assert notebook.shell() is None
    assert type(notebook.progress(VIEWS["grpo"].line)) is Progress


def test_one_output_is_written_anew() -> None:
    outputs: list[str] = []
    with NotebookProgress(VIEWS["grpo"].line, outputs.append, print) as progress:
        with progress.phase("starting <Ray>"):
            assert "starting &lt;Ray&gt; ..." in outputs[-1]
        progress.begin(20)
        for step in range(1, 21):
            progress.step(step, step_metrics(step) | {"tokens_per_s": 1000.0 * step})
        progress.step(20, {"accuracy/validation": 0.5})
        progress.note("<script>")
    page = ET.fromstring(outputs[-1])
    head, *rows = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert (head[0], head[-1]) == ("step", "tok/s")
    assert [row[0] for row in rows] == [str(step) for step in range(20, 8, -1)]  # the newest
    assert rows[0][head.index("accuracy")] == "0.500"  # came later, for the same step
    assert rows[1][head.index("accuracy")] == ""
    bar = page.find(".//progress")
    assert bar is not None
    assert bar.attrib == {"max": "20", "value": "20"}
    notes = page.find(".//pre")
    assert notes is not None
    assert (notes.text or "").startswith("✓ starting <Ray>")
    assert (notes.text or "").endswith("<script>")


def test_a_phase_that_fails_says_so() -> None:
    outputs: list[str] = []
    progress = NotebookProgress(VIEWS["grpo"].line, outputs.append, print)
    with pytest.raises(ValueError, match="no"), progress.phase("starting"):
        raise ValueError("no")
    assert "✗ starting" in outputs[-1]


def test_the_report_is_a_document_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text('<html><script>alert("x")</script></html>')
    added: list[str] = []
    NotebookProgress(VIEWS["grpo"].line, print, added.append).report(tmp_path / "report.html")
    frame = ET.fromstring(added[0])
    assert frame.attrib["srcdoc"] == '<html><script>alert("x")</script></html>'
    assert frame.attrib["sandbox"] == "allow-scripts"  # and not this page's origin
