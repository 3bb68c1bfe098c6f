"""Rules of the house that no linter knows."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = [path for room in ("flows", "tasks", "actors", "configs", "benchmarks") for path in (ROOT / room).rglob("*.py")]


def test_only_the_settings_module_reads_the_environment() -> None:
    readers = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            direct = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in {"environ", "getenv"} for a in node.names)
            if direct or imported:
                readers.append(str(path.relative_to(ROOT)))
    # client.py is each worker's beginning, and imports nothing of ours.
    assert set(readers) == {"configs/settings.py", "actors/forks/client.py"}


def test_pins_have_hashes_and_no_addresses() -> None:
    for name in ("cpu", "gpu"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert not re.search(r"https?://|file:|--index|--find-links|--extra-index", text)
        pinned = re.findall(r"^[A-Za-z0-9_.-]+(?:\[[^\]]*\])?==", text, flags=re.MULTILINE)
        assert len(pinned) > 100
        assert text.count("--hash=sha256:") >= len(pinned)


def test_modules_and_functions_stay_small() -> None:
    for path in CODE:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 60, f"{path}: {node.name}"


def test_every_module_says_what_it_is_for() -> None:
    for path in CODE:
        if path.read_text().strip():
            assert ast.get_docstring(ast.parse(path.read_text())), path
