"""Passwords are refused where they would be written down, references are not, and messages hold neither values nor passwords."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.environments import build
from actors.storage import Folder
from configs.base import ConfigError, explain
from configs.checkpoint import CheckpointConfig
from configs.environment import EnvironmentConfig
from configs.loader import load
from configs.redaction import hidden, no_secret_in_override, no_secret_in_url, redacted, remember
from configs.retrain import RetrainConfig
from configs.secrets import gather, know, resolve

SECRET = "canary-aTUjk38Q"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/run", f"s3://key:{SECRET[:4]}/{SECRET}@bucket/run", f"https://me:{SECRET}@host/data.jsonl",
        f"https://{SECRET}@host/x", f"simplecache::https://me:{SECRET}@host/x", f"sftp://me:{SECRET}@host/x", f"fork:s3://k:{SECRET}@b/run",
        f"https://host/x?X-Amz-Signature={SECRET}", f"https://host/x?a=1&token={SECRET}", f"https://me:${{env:A}}{SECRET}@host/x", f"https://{SECRET}:@host/x",
    ],
)  # fmt: skip
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CheckpointConfig(url=url)
    message = str(explain(caught.value, CheckpointConfig, "recipe 'x'"))
    assert "${env:NAME}" in message
    assert SECRET not in message


@pytest.mark.parametrize(
    "url",
    [
        "/runs/x@y:z", "https://me:${env:PASSWORD}@host/x", "runs/latest", "s3://bucket/a@b:c/d", "https://${env:USER}:${env:PASSWORD}@host:8080/x?page=2&token=${env:T}",
        "https://${file:/run/secrets/user:pw}@[::1]:80/x", "${env:STORE}/runs", "abfs://container@account.dfs.core.windows.net/x",
        "sftp://me@host/x", "memory://x", "hdfs://name:8020/x", "file:///x", "gs://b/x?versionId=3", "fork:runs/x", "zip://a.jsonl::s3://b/x.zip",
    ],
)  # fmt: skip
def test_other_places_are_taken_as_they_are(url: str) -> None:
    assert no_secret_in_url(url) == url


@pytest.mark.parametrize(
    "options",
    [{"api_key": SECRET}, {"a": {"db_password": SECRET}}, {"clients": [{"token": SECRET}]}, {"where": f"https://me:{SECRET}@host/"}],
)
def test_a_secret_among_options_is_refused_and_not_repeated(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        EnvironmentConfig(kind="python", import_path="a:B", options=options)
    message = str(explain(caught.value, EnvironmentConfig, "recipe 'x'"))
    assert "${env:NAME}" in message
    assert SECRET not in message


def test_options_that_are_no_secrets() -> None:
    options = {"token": "${env:TOKEN}", "max_tokens": 3, "stop_token": "</s>", "keys": ["a"], "key": "id", "password": "", "tokens": "x"}
    assert EnvironmentConfig(kind="python", import_path="a:B", options=options).options == options


@pytest.mark.parametrize("override", [f"checkpoint.url=s3://k:{SECRET}@b", f"environment.options.api_key={SECRET}", f"steps:{SECRET}"])
def test_overrides(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("arithmetic-cpu", ["environment.kind=python", "environment.import_path=a:B", override])
    if "=" in override:
        assert SECRET not in str(caught.value)
        with pytest.raises(ValueError, match="env:NAME"):
            no_secret_in_override(override)


def test_overrides_of_a_night() -> None:
    recipe = load("retrain-cpu", [], RetrainConfig).model_dump()
    recipe["training"]["overrides"] = [f"checkpoint.url=s3://k:{SECRET}@b"]
    with pytest.raises(ValidationError) as caught:
        RetrainConfig.model_validate(recipe)
    assert SECRET not in str(explain(caught.value, RetrainConfig, "recipe 'x'"))


def test_messages_have_the_reference_in_place_of_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDACTED_PASSWORD", SECRET)
    assert resolve("https://me:${env:REDACTED_PASSWORD}@h/x", "url") == f"https://me:{SECRET}@h/x"
    assert hidden(f"cannot open https://h/{SECRET}/x") == "cannot open https://h/${env:REDACTED_PASSWORD}/x"
    assert redacted("see ftp://me:other@host/x?sig=abc&b=1") == "see ftp://***@host/x?sig=***&b=1"
    remember("abc", "${env:SHORT}")
    assert hidden("abc") == "abc"


def test_what_another_process_has_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATHERED_KEY", SECRET)
    found = gather({"options": [{"key": "${env:GATHERED_KEY}"}], "path": "x"}, "environment")
    assert found == {"${env:GATHERED_KEY}": SECRET}
    monkeypatch.delenv("GATHERED_KEY")
    know(found)
    assert resolve("${env:GATHERED_KEY}", "key") == SECRET
    with pytest.raises(ConfigError, match=r"environment\.options\[0\]\.key: .*GATHERED_OTHER"):
        gather({"options": [{"key": "${env:GATHERED_OTHER}"}]}, "environment")


def test_a_folder_at_a_secret_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a registry, and of checkpoints."""
    place = tmp_path / SECRET
    monkeypatch.setenv("SECRET_PLACE", str(place))
    folder = Folder("${env:SECRET_PLACE}/registry", "registry.url")
    assert folder.create("a", b"1")
    assert (place / "registry" / "a").read_bytes() == b"1"
    assert SECRET not in folder.url
    (place / "registry" / "a").chmod(0)
    (place / "file").write_text("")
    with pytest.raises(ConfigError, match=r"registry\.url: cannot reach") as caught:
        Folder("${env:SECRET_PLACE}/file", "registry.url").create("b", b"1")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


class Guarded(http.server.BaseHTTPRequestHandler):
    """One data set, for those who have the password."""

    content = b'{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n'
    wanted = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()

    def do_GET(self) -> None:
        good = self.headers["Authorization"] == self.wanted and "missing" not in self.path
        self.send_response(200 if good else 403)
        self.send_header("Content-Length", str(len(self.content) if good else 0))
        self.end_headers()
        if good and self.command == "GET":
            self.wfile.write(self.content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def guarded() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_data_behind_a_password(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARDED_PASSWORD", SECRET)
    place = f"http://me:${{env:GUARDED_PASSWORD}}@{guarded}"
    environment = build(EnvironmentConfig(kind="dataset", path=f"{place}/x.jsonl", validation_size=1), 0)
    problems = [environment.problem(split, 0) for split in ("train", "validation")]
    assert [problem.answer for problem in problems] == ["2", "4"]
    assert SECRET not in str(problems)
    with pytest.raises(ConfigError) as caught:
        build(EnvironmentConfig(kind="dataset", path=f"{place}/missing.jsonl"), 0)
    assert SECRET not in str(caught.value)


def test_every_url_of_every_recipe_is_checked() -> None:
    """A field that is a URL by its name or its description has the type that refuses passwords."""
    import configs.evaluate
    import configs.run
    import configs.sft  # noqa: F401  (all configuration classes)
    from configs.base import StrictModel

    def every(model: type[StrictModel]) -> set[type[StrictModel]]:
        return {model}.union(*(every(child) for child in model.__subclasses__()))

    for model in every(StrictModel):
        if not model.__module__.startswith("configs."):
            continue
        for name, field in model.model_fields.items():
            if name == "url" or "URL" in (field.description or ""):
                assert "no_secret_in_url" in f"{field.annotation!r} {field.metadata!r}", f"{model.__name__}.{name}"
