"""Every wrong input: one line that names what is wrong and where, exit code 2, and nothing of how this project is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.flows.messages import PAGE, message, row, write_model
from tests.flows.wrong_inputs import SECTIONS, Wrong

INPUTS = [(section, wrong) for section, inputs in SECTIONS.items() for wrong in inputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    parts = re.split(r"^## (.*)\n\n.*\n\|---\|---\|\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {section: text.strip().splitlines() for section, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize(("section", "wrong"), INPUTS, ids=lambda part: part.what if isinstance(part, Wrong) else "")
def test_an_input(section: str, wrong: Wrong, tmp_path: Path, model: Path, table: dict[str, list[str]]) -> None:
    said = message(wrong, tmp_path, model)
    assert not re.search(rf"({re.escape(str(ROOT))}|\b(configs|actors|tasks|flows))/\S*\.py", said), said
    for word in wrong.words:
        assert word in said, said
    assert row(wrong, said) in table[section], "docs/messages.md is behind: `.venv/bin/python -m tests.flows.messages` writes it anew"


def test_the_table_has_each_once(table: dict[str, list[str]]) -> None:
    assert {section: len(rows) for section, rows in table.items()} == {section: len(inputs) for section, inputs in SECTIONS.items()}
    assert len(INPUTS) >= 60
    assert all(len({wrong.what for wrong in inputs}) == len(inputs) for inputs in SECTIONS.values())
