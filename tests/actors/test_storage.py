"""Small files: one of many creators wins, and nobody ever reads a part."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from actors.storage import Folder
from configs.base import ConfigError


def test_create_read_replace_remove(url: str) -> None:
    folder = Folder(url, "registry.url")
    assert folder.names() == []
    assert folder.read("a/1.json") is None
    assert folder.create("a/1.json", b"mine")
    assert not folder.create("a/1.json", b"yours")
    assert folder.read("a/1.json") == b"mine"
    folder.replace("a/1.json", b"newer")
    folder.replace("b.json", b"other")
    assert folder.read("a/1.json") == b"newer"
    assert folder.names("a") == ["1.json"]
    assert folder.names() == ["a", "b.json"]
    assert folder.names(below=True) == ["a/1.json", "b.json"]
    folder.remove("a")
    folder.remove("a")
    assert folder.names(below=True) == ["b.json"]


def test_large_files_arrive_whole(url: str, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(bytes(range(256)) * 4096)
    folder = Folder(url, "registry.url")
    folder.put(source, "models/1/weights")
    assert folder.read("models/1/weights") == source.read_bytes()


def test_one_of_many_creators_wins_and_readers_see_whole_files(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "place"), "registry.url")
    contents = [bytes([65 + number]) * 200_000 for number in range(8)]
    stop, torn = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for name in ("pointer", "once-0"):
                found = folder.read(name)
                if found is not None and found not in contents:
                    torn.append(name)

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(10):
            wins = list(pool.map(lambda content, name=f"once-{round_}": folder.create(name, content), contents))
            assert wins.count(True) == 1
            assert folder.read(f"once-{round_}") == contents[wins.index(True)]
            list(pool.map(lambda content: folder.replace("pointer", content), contents))
    stop.set()
    reader.join()
    assert torn == []
    assert folder.names() == [*(f"once-{number}" for number in range(10)), "pointer"]  # no temporary file is left


def test_a_put_whose_answer_was_lost_counts() -> None:
    """An object store may have stored the file although the call failed; another's file is never taken for ours."""
    folder = Folder("memory://answer-lost", "registry.url")
    put = folder.fs.pipe_file

    def lost(path: str, value: bytes, mode: str) -> None:
        put(path, value, mode=mode)
        raise OSError("connection reset")

    folder.fs.pipe_file = lost
    try:
        assert folder.create("1.json", b"mine")
        assert not folder.create("1.json", b"yours")
    finally:
        del folder.fs.pipe_file


def test_an_unknown_kind_of_url_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"registry\.url: cannot reach nosuch://x"):
        Folder("nosuch://x", "registry.url")


def test_a_client_that_is_not_installed_is_named_with_its_command() -> None:
    """Of the store of the extra `gs`, which no test installs."""
    wanted = f"checkpoint.url: cannot reach gs://bucket/x: the package gcsfs is not installed: pip install gcsfs=={fsspec.__version__}"
    with pytest.raises(ConfigError) as error:
        Folder("gs://bucket/x", "checkpoint.url")
    assert str(error.value) == wanted
