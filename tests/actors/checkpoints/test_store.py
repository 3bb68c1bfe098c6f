"""The store of checkpoints: whole or not there, kept by the rules, and refused when it is not what was written."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest, kept, manifest_name, step_of
from actors.checkpoints.store import CheckpointStore, Draft
from actors.storage import Content, Folder
from configs.base import ConfigError
from configs.checkpoint import CheckpointConfig
from tests.stores import memory

RULES = CheckpointConfig(keep_last=2)
PARTS = {"rollout.json": b"{}", "policy/a.distcp": bytes(1000), "policy/.metadata": b"pickle", "run/metrics.jsonl": b"1\n"}


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    url = str(tmp_path / "checkpoints") if request.param == "file" else "memory://checkpoints"
    yield CheckpointStore(url, tmp_path / "scratch")
    fsspec.filesystem("memory").store.clear()


def manifest_of(step: int, **fields: Any) -> Manifest:
    values: dict[str, Any] = {"flow": "grpo", "run": "r", "step": step, "weight_version": step, "shape": "s", "config": {}, "packages": {}}
    return Manifest(**(values | {"folder": "data/x", "files": {}} | fields))


def filled(store: CheckpointStore, step: int, parts: dict[str, bytes] | None = None) -> Draft:
    draft = store.draft(step)
    for name, content in (PARTS if parts is None else parts).items():
        (draft.directory / name).parent.mkdir(exist_ok=True, parents=True)
        (draft.directory / name).write_bytes(content)
    return draft


def write(store: CheckpointStore, step: int, score: float | None = None, rules: CheckpointConfig = RULES) -> Manifest:
    return store.publish(filled(store, step), manifest_of(step, score=score), rules)


def test_what_was_written_comes_back(store: CheckpointStore) -> None:
    assert store.newest() is None
    written = write(store, 3)
    assert store.newest() == store.at(3) == written
    with store.fetched(written) as root:
        assert {name: (root / written.folder / name).read_bytes() for name in PARTS} == PARTS


def test_one_part_alone(store: CheckpointStore) -> None:
    written = write(store, 3)
    with store.fetched(written, "run") as root:
        assert (root / written.folder / "run/metrics.jsonl").read_bytes() == b"1\n"
    assert set(written.of("policy")) == {f"{written.folder}/policy/a.distcp", f"{written.folder}/policy/.metadata"}


def test_shared_files_are_kept_once(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w").write_bytes(b"reference")
    shared = store.keep(tmp_path / "weights", "abc")
    for step in (1, 2, 3):
        store.publish(filled(store, step), manifest_of(step, shared=shared), CheckpointConfig(keep_last=1))
    with store.fetched(store.at(3)) as root:
        assert (root / "reference/abc/w").read_bytes() == b"reference"


def test_a_draft_that_was_not_published_is_no_checkpoint(store: CheckpointStore) -> None:
    write(store, 1)
    filled(store, 2)
    assert store.steps() == [1]
    assert store.newest() == store.at(1)


def test_drafts_of_killed_writers_are_removed_and_nothing_else(store: CheckpointStore) -> None:
    written, left = write(store, 1), filled(store, 2)
    folder = Folder(store.url, "checkpoint.url")
    for name in ("data/mine", "data/step-000002-mine", "other/step-000002-0123abcd"):
        folder.replace(f"{name}/file", b"of somebody else")
    folder.replace(f"{left.folder}/half-uploaded", b"x")
    before = set(folder.names(below=True))
    store.remove_drafts()
    assert before - set(folder.names(below=True)) == {name for name in before if name.startswith(left.folder)} != set()
    with store.fetched(written):
        pass


def test_a_step_is_written_once(store: CheckpointStore) -> None:
    first = write(store, 1)
    with pytest.raises(CheckpointError, match="written by another run"):
        write(store, 1)
    assert store.at(1) == first


def test_a_draft_without_files_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="has no files"):
        store.publish(store.draft(1), manifest_of(1), RULES)


def test_retention_removes_data_too(store: CheckpointStore) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.2)):
        write(store, step, score)
    assert store.steps() == [2, 4, 5]
    folder = Folder(store.url, "checkpoint.url")
    assert {name.split("/")[0] for name in folder.names("data", below=True)} == {store.at(s).folder.split("/")[1] for s in (2, 4, 5)}


def test_later_checkpoints_are_withdrawn(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write(store, step, rules=CheckpointConfig(keep_last=9))
    store.withdraw_after(1)
    assert store.steps() == [1]
    write(store, 2)


def damage(store: CheckpointStore, name: str, content: bytes | None) -> None:
    folder = Folder(store.url, "checkpoint.url")
    if content is None:
        folder.remove(name)
    else:
        folder.replace(name, content)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is missing"), (b"x", "has 1 bytes, 1000 were written"), (bytes(999) + b"1", "its SHA-256 is another")]
)
def test_damaged_files_are_refused_by_name(store: CheckpointStore, content: bytes | None, message: str) -> None:
    written = write(store, 1)
    damage(store, f"{written.folder}/policy/a.distcp", content)
    with pytest.raises(CheckpointError, match=r"step 1 cannot be used.*policy/a\.distcp.*" + message), store.fetched(written):
        raise AssertionError("never")
    with store.fetched(written, "run"):  # the other parts are what they were
        pass


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 2, "format"),
        ("folder", "../elsewhere", "leads out of"),
        ("folder", "/etc", "leads out of"),
        ("folder", ".", "leads out of"),
        ("folder", "data", "no folder of a checkpoint"),
        ("folder", "reference/abc", "no folder of a checkpoint"),
        ("shared", {"C:x": {"size": 1, "sha256": "0"}}, "leads out of"),
        ("files", {"../../x": {"size": 1, "sha256": "0"}}, "leads out of"),
        ("more", 1, "more"),
        ("step", -1, "step"),
        ("step", 7, "was renamed"),
    ],
)
def test_manifests_of_others_are_refused(store: CheckpointStore, field: str, value: Any, message: str) -> None:
    written = write(store, 1)
    damage(store, written.name, json.dumps(written.model_dump(mode="json") | {field: value}).encode())
    with pytest.raises(CheckpointError, match=message):
        store.at(1)


@given(content=st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_manifest_or_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint's manifest"):
        Manifest.parse(content, "here")


def test_a_manifest_cut_off_anywhere_is_refused(store: CheckpointStore) -> None:
    whole = write(store, 1).model_dump_json().encode()
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            Manifest.parse(whole[:length], "here")


def test_a_step_that_is_not_there(store: CheckpointStore) -> None:
    write(store, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint after step 2 \(there are: 1\)"):
        store.at(2)


def test_a_store_that_refuses() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.url"):
        CheckpointStore("nosuchkind://x", Path("/nowhere"))


@given(st.dictionaries(st.integers(0, 50), st.none() | st.floats(0, 1), min_size=1), st.integers(1, 4), st.none() | st.integers(1, 10))
def test_the_newest_and_the_best_always_stay(scores: dict[int, float | None], last: int, every: int | None) -> None:
    stay = kept(scores, last=last, every=every, best=True)
    assert stay <= scores.keys()
    assert set(sorted(scores)[-last:]) <= stay
    known = {step: score for step, score in scores.items() if score is not None}
    if known:
        assert any(known.get(step) == max(known.values()) for step in stay)
    if every:
        assert all(step in stay for step in scores if step % every == 0)


@given(st.integers(0, 10**8))
def test_names_of_manifests(step: int) -> None:
    assert step_of(manifest_name(step)) == step
    assert step_of(f"x{manifest_name(step)}") is None


def test_content_of_a_crash_at_every_byte(tmp_path: Path) -> None:
    """However far the next attempt came, the checkpoint before it is the newest and whole."""
    store = CheckpointStore(str(tmp_path / "c"), tmp_path / "s")
    write(store, 1)
    parts = list(PARTS.items())
    for done in range(len(parts)):
        for cut in (0, 1, len(parts[done][1]) // 2):
            filled(store, 2, dict(parts[:done]) | {parts[done][0]: parts[done][1][:cut]})
            newest = store.newest()
            assert newest is not None
            assert newest.step == 1
            with store.fetched(newest) as root:
                assert Content.of_file(root / newest.folder / "policy/a.distcp") == newest.files["policy/a.distcp"]


def test_a_writer_that_is_killed_at_any_time_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Fifty writers, each killed at a random moment of its endless writing: what has a manifest is whole."""
    url, rules, chance = str(tmp_path / "c"), CheckpointConfig(keep_last=1), random.Random(0)
    write(CheckpointStore(url, tmp_path), 1)
    last = 1
    for _ in range(50):
        writer = os.fork()
        if writer == 0:
            store = CheckpointStore(url, tmp_path)
            for step in itertools.count(last + 1):
                parts = {name: content * 300 for name, content in PARTS.items()}
                store.publish(filled(store, step, parts), manifest_of(step), rules)
        time.sleep(chance.uniform(0.0, 0.06))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        store = CheckpointStore(url, tmp_path)
        newest = store.newest()
        assert newest is not None
        assert newest.step >= last
        with store.fetched(newest):
            last = newest.step
    assert last > 1


def test_a_store_that_ignores_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(memory(), tmp_path)
    store.probe()
    assert Folder(store.url, "checkpoint.url").names() == []
    kind = type(fsspec.filesystem("memory"))
    original = kind.pipe_file
    monkeypatch.setattr(kind, "pipe_file", lambda self, path, value, mode="overwrite", **more: original(self, path, value, **more))
    with pytest.raises(ConfigError, match="ignores conditional writes"):
        store.probe()


def test_a_store_that_is_silent_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(memory(), tmp_path, timeout_s=0.2)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", lambda *_, **__: time.sleep(5))
    with pytest.raises(ConfigError, match=r"checkpoint\.url: cannot reach memory://\w+: TimeoutError: no answer within 0.2 s"):
        store.steps()


def test_a_full_disk_is_one_clear_error_and_the_checkpoint_before_stands(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write(store, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    draft = filled(store, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_write", full)
        patch.setattr(type(fsspec.filesystem("memory")), "put_file", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            store.publish(draft, manifest_of(2), RULES)
    assert store.newest() == before
