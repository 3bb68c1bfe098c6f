"""Reports over HTTP: the run's own page and nothing else, behind Prefect's password where there is one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from configs import settings
from flows.service.pages import reports_server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    """URL of a run's page; beside its report lies what nobody is to see."""
    (tmp_path / "report.html").write_text("<p>the report", encoding="utf-8")
    (tmp_path / "config.yaml").write_text("key: value")
    with reports_server():
        number = str(uuid.uuid4())
        (Path(str(settings.get(settings.PAGES))) / number).symlink_to(tmp_path)
        yield f"{settings.get(settings.PAGES_URL)}/{number}"


def test_a_runs_report_as_it_stands(run: str, tmp_path: Path) -> None:
    answer = httpx.get(run)
    assert (answer.status_code, answer.text, answer.headers["cache-control"]) == (200, "<p>the report", "no-store")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    (tmp_path / "report.html").write_text("<p>later", encoding="utf-8")
    assert httpx.get(run).text == "<p>later"
    assert run.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("beyond", ["/config.yaml", "/../config.yaml", "/report.html", "/%2e%2e/config.yaml", "?x", "//"])
def test_nothing_else(run: str, beyond: str) -> None:
    assert httpx.get(run + beyond).status_code == 404
    root, number = run.rsplit("/", 1)
    assert (
        httpx.get(f"{root}/").status_code
        == httpx.get(f"{root}/{uuid.uuid4()}").status_code
        == httpx.get(f"{root}/{number[:-1]}").status_code
        == 404
    )
    assert httpx.post(run).status_code == 501


def test_prefects_password(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "name:p4ss")
    refused = httpx.get(run)
    assert (refused.status_code, refused.text, refused.headers["www-authenticate"]) == (401, "", 'Basic realm="grpo-flows"')
    assert httpx.get(run, auth=("name", "other")).status_code == 401
    assert httpx.get(run, auth=("name", "p4ss")).text == "<p>the report"


def test_it_ends_with_its_block(run: str) -> None:
    with reports_server():
        inner = str(settings.get(settings.PAGES_URL))
        assert httpx.get(inner).status_code == 404
    assert settings.get(settings.PAGES_URL) == run.rsplit("/", 1)[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(inner)
