"""What each wrong input is answered, as docs/messages.md. `python -m tests.flows.messages` writes that page anew."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from configs.loader import load, recipe_names
from flows.cli import main
from tests.conftest import ROOT
from tests.flows.wrong_inputs import SECTIONS, Wrong

PAGE = ROOT / "docs" / "messages.md"
_HEAD = """# Wrong inputs and their messages

What is wrong is said in one line, before anything starts, with exit code 2: the field, the file and the line, and what to do. This table is
made of what the command line says (`.venv/bin/python -m tests.flows.messages` writes it anew; a test compares). `mine.yaml` is a recipe of
one's own.
"""


def _flow(name: str) -> tuple[Any, Any]:
    session = {"grpo": "grpo_session:GrpoSession", "sft": "sft_session:SftSession", "evaluate": "evaluate_session:EvaluateSession"}
    module, _, kind = session.get(name, "night:Night").partition(":")
    return getattr(importlib.import_module(f"flows.{name}"), name), getattr(importlib.import_module(f"flows.{module}"), kind)


def write_model(folder: Path) -> Path:
    """A small model that is whole."""
    from actors.preflight import prepare_model

    return Path(prepare_model(load("arithmetic-cpu"), folder))


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    sys.modules.pop("own", None)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("own", None)


def message(wrong: Wrong, folder: Path, model: Path) -> str:
    """What stands on stderr. Args: folder: empty. model: that a damage is done to a copy of."""
    for name, content in wrong.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if wrong.damage is not None:
        shutil.copytree(model, folder / "model")
        wrong.damage(folder / "model")
    arguments = [*(("--recipe", "mine.yaml") if "mine.yaml" in wrong.files else ()), *wrong.arguments]
    said = io.StringIO()
    no_run = patch("flows.cli._run", side_effect=AssertionError(f"{wrong.what}: a run would begin"))
    with no_run, chdir(folder), _importable(folder), redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main(*_flow(wrong.flow), arguments)
    text = said.getvalue()
    assert code == 2, text
    assert "Traceback" not in text
    assert text.startswith("error: "), text
    assert len(text.splitlines()) == text.count("error: ") == 1, text
    return text.removeprefix("error: ").rstrip("\n").replace(f"{folder}{os.sep}", "")


def row(wrong: Wrong, said: str) -> str:
    """Of the table. The names of all recipes are left out: there will be more."""
    shown = said.replace(", ".join(recipe_names()), "arithmetic-cpu, ...").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return f"| {wrong.what.replace('|', '/')} | {shown} |"


def page(rows: dict[str, list[str]]) -> str:
    """The page. Args: rows: by section."""
    parts = [_HEAD]
    for section, found in rows.items():
        parts.append("\n".join((f"## {section}", "", "| input | message |", "|---|---|", *found, "")))
    return "\n".join(parts)


def _write() -> None:
    with tempfile.TemporaryDirectory() as root:
        model, rows = write_model(Path(root) / "model"), {}
        for section, inputs in SECTIONS.items():
            rows[section] = []
            for number, wrong in enumerate(inputs):
                folder = Path(root) / f"{len(rows)}-{number}"
                folder.mkdir()
                rows[section].append(row(wrong, message(wrong, folder, model)))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    _write()
