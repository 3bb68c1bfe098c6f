"""Models by name: a directory, a URL, a hub id; what is fetched, what is kept, and what is said when it cannot be had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import huggingface_hub
import pytest

from actors.models.hf import check_model_dir
from actors.models.source import _local_gguf, gguf_model, known_model, local_model
from actors.preflight import prepare_model
from configs import settings
from configs.base import ConfigError
from configs.loader import load
from configs.model import ModelConfig
from tests.actors.models.hub import REPO, Hub, serving

type Ask = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(prepare_model(load("arithmetic-cpu"), tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What a user with a cache of its own gets for a name, where a run's switches are on."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    for name, value in {**settings.OFFLINE, "GRPO_FLOWS_DEFAULTS": ",".join(settings.OFFLINE)}.items():
        monkeypatch.setenv(name, value)

    def one(name: str, *, endpoint: str = "http://127.0.0.1:9", known: bool = False) -> str:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        try:
            return (known_model if known else local_model)(name)
        except ConfigError as error:
            return f"error: {error}"

    return one


def test_a_hub_id_is_fetched_once_and_then_needs_no_network(ask: Ask, model: Path) -> None:
    with serving(model, "pytorch_model.bin", "onnx/config.json", "consolidated.safetensors") as hub:
        assert "is not on this machine yet; the run fetches it" in ask(REPO, endpoint=hub.url, known=True)
        assert hub.asked == []
        found = Path(ask(REPO, endpoint=hub.url))
        assert {path.name for path in found.iterdir()} == {path.name for path in model.iterdir()}
        for path in model.iterdir():
            assert (found / path.name).read_bytes() == path.read_bytes()
        check_model_dir(str(found))
        _nothing_else_was_fetched(hub)
    assert ask(REPO) == str(found)
    assert ask(REPO, known=True) == str(found)


def _nothing_else_was_fetched(hub: Hub) -> None:
    assert not [line for line in hub.asked if "pytorch_model" in line or "onnx" in line or "consolidated" in line]


def test_what_is_left_of_a_broken_off_fetch_is_completed(ask: Ask, model: Path) -> None:
    with serving(model) as hub:
        found = Path(ask(REPO, endpoint=hub.url))
        (found / "model.safetensors").unlink()
        assert "the hub could not be asked for it" in ask(REPO)
        assert ask(REPO, endpoint=hub.url) == str(found)
        assert (found / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_another_kind_of_model_is_refused_before_its_weights_come(ask: Ask, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    (other / "model.safetensors").write_bytes(b"x" * 100)
    with serving(other) as hub:
        assert ask(REPO, endpoint=hub.url).startswith(f"error: model.path: {REPO} of the hub is of type 'mamba'; supported are dense llama")
        assert not [line for line in hub.asked if "model.safetensors" in line]


def test_without_a_network(ask: Ask, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ask(REPO)
    assert said.startswith(
        f"error: model.path: there is no directory {REPO}, nor is it in the cache of Hugging Face, and the hub could not be asked"
    )
    assert "ConnectError" in said
    assert f"`hf download {REPO}`" in said
    with serving(model) as hub:
        assert "the hub has no model maker/none" in ask("maker/none", endpoint=hub.url)
        hub.asked.clear()
        monkeypatch.setenv("GRPO_FLOWS_DEFAULTS", "")  # the user has switched it off, and not we
        assert "HF_HUB_OFFLINE is set: unset it" in ask(REPO, endpoint=hub.url)
        assert hub.asked == []


def test_a_url_is_copied_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = fsspec.filesystem("memory")
    for path in model.iterdir():
        store.pipe_file(f"/models/tiny/{path.name}", path.read_bytes())
    store.pipe_file("/models/tiny/pytorch_model.bin", b"not wanted")
    with pytest.raises(ConfigError, match="not on this machine yet"):
        known_model("memory://models/tiny")
    found = local_model("memory://models/tiny")
    assert {path.name for path in Path(found).iterdir()} == {path.name for path in model.iterdir()}
    check_model_dir(found)
    assert local_model("memory://models/tiny") == known_model("memory://models/tiny") == found
    store.pipe_file("/models/tiny/config.json", (model / "config.json").read_bytes() + b"\n")
    assert local_model("memory://models/tiny") != found
    store.pipe_file("/models/some.gguf", b"GGUF")
    assert _local_gguf("memory://models/some.gguf", "model.gguf").read_bytes() == b"GGUF"
    with pytest.raises(ConfigError, match=r"^model\.path: memory://nowhere has no config\.json"):
        local_model("memory://nowhere")
    with pytest.raises(ConfigError, match=r"^policy\.teacher\.path: there is no file memory://models/no\.gguf"):
        local_model("memory://models/no.gguf", "policy.teacher.path")
    with pytest.raises(ConfigError, match=r"model\.gguf: there is no file memory://models/no\.gguf"):
        gguf_model("memory://models/no.gguf")


def test_a_directory_is_itself(model: Path) -> None:
    assert local_model(str(model)) == known_model(str(model)) == str(model)
    assert ModelConfig.model_validate({"path": "weights/some.gguf"}) == ModelConfig(gguf="weights/some.gguf")


@pytest.mark.parametrize("place", ["s3://bucket/runs", "file:///tmp/runs", "gs:/x", "memory://runs"])
def test_runs_are_not_written_to_a_folder_that_is_called_like_a_store(place: str) -> None:
    with pytest.raises(ConfigError, match=r"output_dir: .* is a URL: runs are written to a disk"):
        load("arithmetic-cpu", [f"output_dir={place}"])
