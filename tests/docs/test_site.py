"""`make docs`: the site is built without a warning, which checks every link between pages, and has every setting."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.evaluate import EvaluateConfig
from configs.retrain import RetrainConfig
from configs.run import RunConfig
from configs.sft import SftConfig
from tests.conftest import ROOT
from tests.e2e.browser import CHROMIUM, chromium

sys.path.append(str(ROOT / "docs" / "site"))
import configuration

BUILT = re.search(r"-m (sphinx .*) build/docs", (ROOT / "Makefile").read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert BUILT is not None
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", *BUILT[1].split(), str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert names <= {path.stem for path in site.glob("*.html")}
    index = (site / "index.html").read_text()
    assert [name for name in sorted(names - {"index"}) if f'href="{name}.html"' not in index] == []


def test_every_setting_is_on_the_site(site: Path) -> None:
    page = (site / "configuration.html").read_text()
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page)))
    for root in (RunConfig, SftConfig, EvaluateConfig, RetrainConfig):
        for _, model in configuration.blocks(root):
            for name, field in model.model_fields.items():
                assert f">{name}<" in page, name
                assert (field.description or "").replace("`", "") in text, field.description


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
def test_in_a_browser(site: Path, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        browser.open((site / "search.html").as_uri() + "?q=num_generations", "Search finished", "Coming from TRL, verl or NeMo-RL")
        browser.open((site / "index.html").as_uri(), "START", "HOW TO", "REFERENCE", "HOW IT WORKS")
        browser.click("Wrong inputs and their messages")
        browser.shows("did you mean 'rollout.responses_per_prompt'? (TRL)")


def test_types_and_defaults() -> None:
    rows = {
        row.split("`")[1]: row
        for row in configuration.table(RunConfig.model_fields["policy"].annotation.model_fields["loss"].annotation)[2:]
    }
    assert rows["kl_coef"].startswith("| `kl_coef` | number, at least 0 | `0.0` |")
    assert "`group` or `batch` or `none`" in rows["normalize_advantages"]
    assert rows["dual_clip"].startswith("| `dual_clip` | number or null, above 1 | `null` |")
    rows = {row.split("`")[1]: row for row in configuration.table(SftConfig)[2:]}
    assert "must be set" in rows["name"]
    assert rows["data"].startswith("| `data` | block | must be set |")
