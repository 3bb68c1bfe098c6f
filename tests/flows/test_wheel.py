"""A wheel of the tree holds all that the commands need, and works from a directory that is not a checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs import settings
from tests.conftest import ROOT
from tests.patience import WAIT_S

BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel's files are: `pip install --no-deps --target`. The pinned libraries are those of this interpreter."""
    place = tmp_path_factory.mktemp("wheel")
    tree = place / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "prefect.yaml"):
        shutil.copy(ROOT / name, tree)
    for room in ("flows", "tasks", "actors", "configs", "tests"):
        shutil.copytree(ROOT / room, tree / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run([sys.executable, "-c", BUILD, str(place)], cwd=tree, capture_output=True, text=True, timeout=WAIT_S, check=True)
    wheel = place / built.stdout.split()[-1]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(place / "site")]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=WAIT_S)
    return place / "site"


def command(installed: Path, cwd: Path, *arguments: str) -> str:
    """What `grpo-flows` says, of the installed files alone."""
    environment = settings.child_environment(PYTHONPATH=str(installed))
    done = subprocess.run(
        [sys.executable, str(installed / "bin/grpo-flows"), *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rooms_recipes_presets_and_deployments_are_in_it(installed: Path, tmp_path: Path) -> None:
    assert {path.name for path in installed.iterdir() if "info" not in path.name} == {"flows", "tasks", "actors", "configs", "bin"}
    assert (installed / "tasks/reporting/report.html.j2").is_file()
    assert len(list((installed / "configs/presets").iterdir())) == len(list((ROOT / "configs/presets").iterdir()))
    deployments = installed / "flows/service/prefect.yaml"
    assert not deployments.is_symlink()
    assert yaml.safe_load(deployments.read_text()) == yaml.safe_load((ROOT / "prefect.yaml").read_text())
    said = command(installed, tmp_path, "recipes")
    for recipe in (ROOT / "configs/recipes").glob("*.yaml"):
        assert recipe.stem in said


def test_a_dry_run_elsewhere(installed: Path, tmp_path: Path) -> None:
    said = command(installed, tmp_path, "run", "arithmetic-cpu", "--dry-run")
    assert "name: arithmetic-cpu" in said
    assert "policy-worker-0" in said
    assert not list(tmp_path.iterdir())


def test_an_installed_package_works_in_the_working_directory(installed: Path, tmp_path: Path) -> None:
    code = "import flows.service.parts as parts; print(parts.PACKAGE, parts.default_home(), parts.is_checkout())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=settings.child_environment(PYTHONPATH=str(installed)),
        capture_output=True, text=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(installed), str(tmp_path), "False"]
