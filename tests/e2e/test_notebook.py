"""docs/notebook: its cells, in a process whose thread has a running event loop, as a notebook's kernel has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs import settings
from tests.conftest import ROOT
from tests.e2e.conftest import SHORT
from tests.patience import WAIT_S

pytestmark = pytest.mark.slow
NOTEBOOK = json.loads((ROOT / "docs/notebook/first-run.ipynb").read_text())
RUNNER = """
import asyncio, json, sys
cells, short = json.load(sys.stdin)
async def main():
    names = {}
    for cell in cells:
        exec(compile(cell, "cell", "exec"), names)
        if "overrides" in names and short:
            names["overrides"] += short
            short.clear()
asyncio.run(main())
"""


def test_its_cells_run(server: str, tmp_path: Path) -> None:
    """With the tests' Prefect server; flows/test_served.py has a kernel with one of its own."""
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    short = [one for one in SHORT if not one.startswith("steps=")]
    environment = settings.child_environment(PREFECT_API_URL=f"{server}/api", PYTHONPATH=settings.python_path(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps([cells, short]), cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "completed - 10 steps" in done.stdout
    assert "12 steps, in the same directory: True" in done.stdout


def test_its_outputs_are_of_these_cells_and_name_no_path() -> None:
    text = json.dumps(NOTEBOOK)
    assert len(text) < 400_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", text)
    outputs = ["".join(map(str, cell["outputs"])) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert "step 10/10" in outputs[2]
    assert "srcdoc" in outputs[2]
    assert "12 steps, in the same directory: True" in outputs[-1]
