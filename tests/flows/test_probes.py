"""Stores that cannot keep two writers apart are refused before anything is trained: those of a run, and that of a night."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from actors.storage import Folder
from configs.base import ConfigError
from configs.loader import load
from configs.retrain import RetrainConfig
from flows.grpo_session import GrpoSession
from flows.night import Night
from tests.stores import memory


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a store that ignores conditional writes, and in which nothing is left."""
    kind, url = type(fsspec.filesystem("memory")), memory()
    original = kind.pipe_file
    monkeypatch.setattr(kind, "pipe_file", lambda self, path, value, mode="overwrite", **more: original(self, path, value, **more))
    yield url
    assert Folder(url, "url").names() == []


def test_a_night_probes_its_registry_before_all_else(careless: str, tmp_path: Path) -> None:
    config = load("retrain-cpu", [f"registry.url={careless}", f"output_dir={tmp_path}/runs"], RetrainConfig)
    with pytest.raises(ConfigError, match=rf"registry\.url: {careless} ignores conditional writes"), Night(config, "retrain-cpu"):
        pass
    assert not (tmp_path / "runs").exists()


def test_a_run_a_night_s_too_probes_its_checkpoints_before_actors_start(careless: str, tmp_path: Path) -> None:
    config = load("arithmetic-cpu", [f"checkpoint.url={careless}", f"output_dir={tmp_path}/runs"])
    session = GrpoSession(config, "arithmetic-cpu")
    with session._stack, pytest.raises(ConfigError, match=rf"checkpoint\.url: {careless} ignores conditional writes"):
        session._choose_directory()  # comes first of all
