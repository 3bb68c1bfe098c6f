"""What a person sees in a browser: the run's stages by name, its progress and its plot, and the deployments.

Screenshots are left in the test's directory (docs/images holds such ones).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from tests.e2e.browser import CHROMIUM, Page, chromium
from tests.e2e.conftest import Watched
from tests.e2e.deployed import PASSWORD, Deployed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Of a person who has given the password."""
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        found.open(deployed.url)
        found.evaluate(f"localStorage.setItem('prefect-password', btoa({PASSWORD!r}))")
        yield found


def test_the_page_of_a_flow_run(deployed: Deployed, watched: Watched, page: Page, tmp_path: Path) -> None:
    run = watched.run
    page.open(f"{deployed.url}/runs/flow-run/{run.id}", run.name, "Completed", "launch-actors")
    page.screenshot(tmp_path / "flow-run.png")
    page.click("Task Runs")
    page.shows("rollout-2", "advantage-2", "train-2", "refit-2", "clear-2")
    page.click("Artifacts")
    page.shows("PROGRESS", "grpo-progress", "IMAGE", "grpo-reward", "grpo-metrics", "grpo-summary")
    page.screenshot(tmp_path / "artifacts.png")


def test_the_pages_of_progress_and_plot(deployed: Deployed, watched: Watched, page: Page, tmp_path: Path) -> None:
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[watched.run.id]))
    ids = {artifact.key: artifact.id for artifact in deployed.client.read_artifacts(artifact_filter=of_run)}
    page.open(f"{deployed.url}/artifacts/artifact/{ids['grpo-progress']}", "grpo-progress", "2 of 2 steps", "100%")
    page.open(f"{deployed.url}/artifacts/artifact/{ids['grpo-reward']}", "grpo-reward")
    plots = "Math.max(0, ...[...document.querySelectorAll('img')].filter(e => e.src.startsWith('data:image/svg')).map(e => e.naturalWidth))"
    deadline = time.monotonic() + 30
    while page.evaluate(plots) < 300:  # pixels of a picture that the browser could decode
        assert time.monotonic() < deadline
        time.sleep(0.2)
    page.screenshot(tmp_path / "plot.png")


def test_the_link_to_the_runs_own_page(deployed: Deployed, watched: Watched, page: Page, tmp_path: Path) -> None:
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[watched.run.id]))
    (link,) = [artifact for artifact in deployed.client.read_artifacts(artifact_filter=of_run) if artifact.key == "grpo-page"]
    page.open(f"{deployed.url}/artifacts/artifact/{link.id}", "grpo-page", "The run's page")
    url = page.evaluate("[...document.querySelectorAll('a')].map(e => e.href).filter(e => e.endsWith('" + str(watched.run.id) + "'))[0]")
    page.open(url.replace("//", f"//{PASSWORD}@", 1), "Curves", "Where the time went", "completed")
    page.screenshot(tmp_path / "page.png")


def test_the_page_of_the_deployments(deployed: Deployed, page: Page, tmp_path: Path) -> None:
    page.open(f"{deployed.url}/deployments", "async", "sync", "default", "grpo", "sft")
    page.screenshot(tmp_path / "deployments.png")
