"""The report's script, in a browser: zoom, the filter of samples, and that the page runs no script but its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.reporting.html import write_report
from tasks.reporting.notebook import NotebookProgress
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.run_trackers import RunTrackers
from tests.e2e.browser import CHROMIUM, Page, chromium
from tests.tasks.reporting.runs import Said, step_metrics, summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]
ATTACK = '</script><script>document.title = "taken"</script><img src=x onerror="document.title = \'taken\'">'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Of a run of 1,000 steps that goes on, with 3 samples of every tenth step."""
    directory = RunDirectory.create(tmp_path_factory.mktemp("runs"), "tiny")
    with RunTrackers(directory) as run:
        for step in range(1, 1001):
            run.metrics(step, step_metrics(step) | {"reward/mean": 5.0 if step == 333 else step % 2})
            if step % 10 == 0:
                said = [Said(f"prompt {step}", ATTACK, "3", reward / 2, step, source=f"set {reward}") for reward in range(2)]
                run.samples(step, "train", [*said, Said("slow", "x", "3", 0.0, step, outcome="timed_out", error="late")])
    write_report(directory, summary(status="running", steps=1000))
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        found.open(directory.report.as_uri(), "Curves", "Samples")
        yield found


def enter(page: Page, **values: object) -> None:
    """Into the controls, as a person does: one has the focus, and so the page does not reload."""
    for name, value in values.items():
        control = f"document.querySelector('[data-view={name}]')"
        entered = f"{control}.focus(); {control}.value = {json.dumps(str(value))}"
        page.evaluate(f"{entered}; {control}.dispatchEvent(new Event('input'))")


def text(page: Page, selector: str) -> Any:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


@pytest.fixture
def fresh(page: Page) -> Page:
    """Nothing chosen."""
    enter(page, to=1000, text="", phase="", outcome="", source="", order="newest", **{"from": 1})
    return page


def test_zoom_is_of_all_curves_and_samples(fresh: Page, tmp_path: Path) -> None:
    line = "figure[data-chart='0'] path.line"
    whole = fresh.evaluate(f"document.querySelector({line!r}).getAttribute('d').split('L').length")
    assert 300 < whole <= 520, "two points of each run of steps"
    tops = fresh.evaluate("[...document.querySelectorAll('figure[data-chart=\"0\"] text.tick')].map(e => e.textContent)")
    assert "5" in tops, "the one spike of 1,000 steps is kept"
    enter(fresh, **{"from": 400}, to=420)
    assert fresh.evaluate(f"document.querySelector({line!r}).getAttribute('d').split('L').length") == 21
    assert "5" not in fresh.evaluate("[...document.querySelectorAll('figure[data-chart=\"0\"] text.tick')].map(e => e.textContent)")
    assert text(fresh, "#count") == "9 of 9 samples that fit"
    fresh.evaluate("document.querySelector('.controls').scrollIntoView()")
    fresh.screenshot(tmp_path / "report-zoom.png")  # docs/images
    assert fresh.evaluate("location.hash") == "#from=400&to=420"
    fresh.evaluate("document.querySelector('[data-all]').click()")
    assert fresh.evaluate("location.hash") == ""
    assert text(fresh, "#count") == "25 of 300 samples that fit"


def test_samples_are_filtered_and_ordered(fresh: Page, tmp_path: Path) -> None:
    enter(fresh, outcome="timed_out")
    assert text(fresh, "#count") == "25 of 100 samples that fit"
    assert text(fresh, "#samples tr").startswith("1000 trainslow")
    enter(fresh, outcome="", source="set 1", text="PROMPT 77", order="lowest")
    assert text(fresh, "#count") == "1 of 1 samples that fit"
    enter(fresh, source="", text="prompt", order="highest")
    assert text(fresh, "#samples td:last-child") == "0.500"
    fresh.evaluate("document.getElementById('samples').scrollIntoView()")
    fresh.screenshot(tmp_path / "report-samples.png")
    fresh.evaluate("document.getElementById('more').click()")
    assert text(fresh, "#count") == "50 of 200 samples that fit"


def test_a_page_that_reloads_stays_as_it_was(fresh: Page) -> None:
    enter(fresh, **{"from": 990}, text="prompt")
    place = fresh.evaluate("location.href")
    fresh.open("about:blank")
    fresh.open(place, "4 of 4 samples that fit")
    assert fresh.evaluate("document.querySelector('[data-view=text]').value") == "prompt"


def test_what_the_model_says_runs_nothing(fresh: Page) -> None:
    enter(fresh, text="onerror")
    assert "onerror" in text(fresh, "#samples")
    fresh.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title = 'taken'\">`)")
    fresh.evaluate("const s = document.createElement('script'); s.textContent = 'document.title = \"taken\"'; document.body.append(s)")
    assert "tiny" in fresh.evaluate("document.title")


def test_it_works_in_the_frame_of_a_notebook(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    with RunTrackers(directory) as run:
        for step in range(1, 21):
            run.metrics(step, step_metrics(step))
            run.samples(step, "train", [Said("p", "r", "3", 0.5, step)])
    write_report(directory, summary(steps=20))
    frames: list[str] = []
    NotebookProgress((), print, frames.append).report(directory.report)
    frame = frames[0].replace("sandbox", "data-sandbox")  # else this page could not look inside
    (tmp_path / "notebook.html").write_text(f"<p>Above</p>{frame}")
    with chromium(tmp_path / "profile") as page:
        page.open((tmp_path / "notebook.html").as_uri(), "Above")
        inside = "document.querySelector('iframe').contentDocument"
        shown = f"{inside}.querySelector('#count')?.textContent"  # by its script, which listens from then on
        page.evaluate(f"new Promise(r => {{ const look = () => {shown} ? r() : setTimeout(look, 50); look(); }})")
        page.evaluate(f"{inside}.querySelector('[data-view=from]').value = '11'")
        page.evaluate(f"{inside}.querySelector('[data-view=from]').dispatchEvent(new Event('input'))")
        assert page.evaluate(f"{inside}.querySelector('#count').textContent") == "10 of 10 samples that fit"
