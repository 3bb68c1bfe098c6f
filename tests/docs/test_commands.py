"""Every command of the documentation is accounted for, and those of flows have settings that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from configs.evaluate import EvaluateConfig
from configs.loader import load
from configs.retrain import RetrainConfig
from configs.run import RunConfig
from configs.sft import SftConfig
from tests.conftest import ROOT
from tests.docs.commands import COMMANDS, By, Command, commands, pages, rule

FLOWS = {"grpo": RunConfig, "sft": SftConfig, "evaluate": EvaluateConfig, "retrain": RetrainConfig}
DEFAULT = {"grpo": "arithmetic-cpu", "sft": "sft-cpu", "evaluate": "evaluate-cpu", "retrain": "retrain-cpu"}
OURS = [one for one in commands() if re.match(r"python -m flows\.(grpo|sft|evaluate|retrain)\b|make (run|sft)\b", one.text)]


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_command_is_run_by_a_test_or_says_why_not(command: Command) -> None:
    found = rule(command)
    assert found is not None, f"{command.text}: say in tests/docs/commands.py which test runs it, or why none does"
    if isinstance(found[1], By):
        assert found[1].proof in (ROOT / found[1].test).read_text()
    if (module := re.match(r"(?:\w+=\S+ )*python -m ([\w.]+)", command.text)) is not None:
        assert importlib.util.find_spec(module[1]) is not None
    if (target := re.match(r"make (\w+)", command.text)) is not None:
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_no_line_is_of_a_command_that_has_gone() -> None:
    used = {found[0] for one in commands() if (found := rule(one)) is not None}
    assert [pattern for pattern, _ in COMMANDS if pattern not in used] == []


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes that the pages write out, each under its `name`."""
    folder = tmp_path_factory.mktemp("recipes")
    for page in pages():
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if (name := re.search(r"^name: (\S+)", block, re.MULTILINE)) is not None:
                (folder / f"{name[1]}.yaml").write_text(block)
    return folder


@pytest.mark.parametrize("command", OURS, ids=lambda command: f"{command.page}: {command.text[:80]}")
def test_the_settings_of_a_command(command: Command, recipes: Path) -> None:
    words = shlex.split(command.text)
    flow = words[1] if words[0] == "make" else words[2].removeprefix("flows.")
    words = (
        shlex.split(words[2].removeprefix("ARGS=")) if words[0] == "make" and len(words) > 2 else words[2 if words[0] == "make" else 3 :]
    )
    flow = "grpo" if flow == "run" else flow
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else DEFAULT[flow]
    overrides = [word for word in words if "=" in word]
    assert {word for word in words if word not in overrides} <= {"--recipe", "--dry-run", recipe}
    load(str(recipes / recipe) if recipe.endswith(".yaml") else recipe, overrides, FLOWS[flow])
