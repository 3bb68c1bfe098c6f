"""Promotions: whole or not at all, wherever a night breaks off, and only one of two nights that began with the same model."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.storage import Content, Folder
from configs.base import ConfigError
from tasks.lease import Lease, LeaseLostError
from tasks.retraining.decision import Scores
from tasks.retraining.registry import Attempt, Promotion, PromotionConflictError, Registry, why_skip
from tests.conftest import ROOT
from tests.stores import memory

FILES = {"config.json": 40, "model.safetensors": 100_000, "tokenizer.json": 500}


class Crash(BaseException):
    """The process ends here."""


def attempt(parent: int | None, data: str = "d") -> Attempt:
    scores = Scores(accuracy=0.5, reward=0.5)
    return Attempt(
        parent=parent, run_id="r", time="2025-01-01T00:00:00+00:00", prompts=3, data_hash=data, config_hash="c", frozen_hash="f",
        metric="accuracy", old=scores, new=scores, reason="because",
    )  # fmt: skip


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[[int], Path]:
    """A model directory whose bytes depend on the number."""

    def make(number: int) -> Path:
        directory = tmp_path / f"candidate-{number}"
        directory.mkdir(exist_ok=True)
        for name, size in FILES.items():
            (directory / name).write_bytes(bytes([number]) * size)
        return directory

    return make


def promote(registry: Registry, path: Path, parent: int | None, keep: int = 5, lease: Lease | None = None) -> Promotion:
    held = lease or Lease(registry.lease_folder, "a night", 60)
    with held.held():
        registry.repair()
        return registry.promote(path, attempt(parent), {"a.jsonl": Content(size=3, sha256="s")}, held, keep)


def byte_of(registry: Registry, promotion: Promotion) -> int:
    """Which candidate it is, all its files being whole."""
    registry.check_model(promotion)
    contents = {name: registry.folder.read(f"{promotion.model}/{name}") for name in promotion.files}
    assert {name: len(content or b"") for name, content in contents.items()} == FILES
    for name, content in contents.items():
        assert content is not None
        assert hashlib.sha256(content).hexdigest() == promotion.files[name].sha256
    (byte,) = set(b"".join(content or b"" for content in contents.values()))
    return byte


def test_lineage_grows_by_one(url: str, candidate: Callable[[int], Path], tmp_path: Path) -> None:
    registry = Registry(url)
    assert registry.current() is None
    first, second = promote(registry, candidate(1), None), promote(registry, candidate(2), 1)
    assert (first.number, first.parent, second.number, second.parent) == (1, None, 2, 1)
    assert Registry(url).current() == second
    assert Registry(url).promotion(1) == first
    assert (byte_of(registry, first), byte_of(registry, second)) == (1, 2)
    assert Promotion.model_validate_json(registry.folder.read("current.json") or b"") == second
    fetched = registry.fetch(second, tmp_path / "fetched")
    assert {path.name: path.read_bytes()[:1] for path in fetched.iterdir()} == dict.fromkeys(FILES, b"\2")
    assert (tmp_path / "fetched").exists() == url.startswith("memory")  # a local registry is used in place


def crash_at(monkeypatch: pytest.MonkeyPatch, point: int, after: bool) -> list[str]:
    """The process ends before or after its write number `point`, or half-way through copying a file. Returns the writes so far."""
    done: list[str] = []

    def crashing(name: str) -> Callable[..., Any]:
        method = getattr(Folder, name)

        def write(self: Folder, *arguments: Any) -> Any:
            done.append(name)
            if len(done) < point:
                return method(self, *arguments)
            if after:
                method(self, *arguments)
            elif name == "put":
                half = arguments[0].parent.with_name("half")
                half.write_bytes(arguments[0].read_bytes()[: arguments[0].stat().st_size // 2])
                method(self, half, arguments[1])
            raise Crash(name)

        return write

    for name in ("create", "replace", "remove", "put"):
        monkeypatch.setattr(Folder, name, crashing(name))
    return done


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_point_leaves_one_whole_promotion(url: str, candidate: Callable[[int], Path], after: bool) -> None:
    """The old one up to the creation of the lineage's entry, the new one from then on; and the next night works."""
    registry = Registry(url)
    before = promote(registry, candidate(1), None)
    seen, byte, crashed, point = set(), 1, True, 0
    while crashed:
        point += 1
        killed = Lease(registry.lease_folder, "the killed night", 60)
        with pytest.MonkeyPatch.context() as patch:
            writes = crash_at(patch, point, after)
            try:
                night(registry, candidate(byte + 1), before.number, killed)
            except Crash:
                pass
            else:
                crashed = False
        current = registry.current()
        assert current is not None
        promoted = current.number == before.number + 1
        assert promoted or current == before
        assert byte_of(registry, current) == byte + promoted
        mirror = Promotion.model_validate_json(registry.folder.read("current.json") or b"")
        assert mirror in (before, current)
        seen.add((writes[-1] if crashed else "end", promoted))
        # The next night, once the lease of the killed one has expired.
        byte += 1 + promoted
        before = night(registry, candidate(byte), current.number, Lease(registry.lease_folder, "the next", 60, lambda: time.time() + 61))
        assert registry.current() == before
        assert byte_of(registry, before) == byte
        assert registry.folder.read("current.json") == registry.folder.read(f"lineage/{before.number:06d}.json")
    # Crashes fell on every kind of write, and the promotion lies between the copies and what tidies up.
    expected = {("put", False), ("create", False), ("replace", True), ("remove", True), ("end", True)}
    assert expected | ({("create", True)} if after else set()) <= seen
    assert ("put", True) not in seen


def night(registry: Registry, path: Path, parent: int, lease: Lease) -> Promotion:
    """All that a night writes into the registry. Unlike `Lease.held`, nothing is released when it breaks off."""
    lease.acquire()
    registry.repair()
    promotion = registry.promote(path, attempt(parent), {}, lease, 2)
    lease.release()
    return promotion


def test_of_two_nights_that_began_with_one_model_one_promotes(url: str, candidate: Callable[[int], Path]) -> None:
    """Even when the lease has failed to keep them apart."""
    registry = Registry(url)
    first = promote(registry, candidate(1), None)
    faster = promote(registry, candidate(2), 1)
    with pytest.raises(PromotionConflictError, match="another run promoted model 2"):
        promote(registry, candidate(3), 1)
    assert registry.current() == faster
    assert sorted(f"models/{name}" for name in registry.folder.names("models")) == sorted([first.model, faster.model])


def test_who_lost_the_lease_does_not_promote(url: str, candidate: Callable[[int], Path]) -> None:
    registry = Registry(url)
    now = [0.0]
    paused, other = (Lease(registry.lease_folder, name, 60, lambda: now[0]) for name in ("paused", "other"))
    paused.acquire()
    now[0] = 61.0
    other.acquire()
    with pytest.raises(LeaseLostError):
        registry.promote(candidate(1), attempt(None), {}, paused, 5)
    assert registry.current() is None


def test_old_models_go_and_lineage_stays(url: str, candidate: Callable[[int], Path]) -> None:
    registry = Registry(url)
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 3, after=True)
        with pytest.raises(Crash):
            registry.promote(candidate(9), attempt(None), {}, Lease(registry.lease_folder, "killed", 60), 2)
    assert len(registry.folder.names("models")) == 1  # half a model
    promotions = [promote(registry, candidate(number), number - 1 or None, keep=2) for number in range(1, 5)]
    assert sorted(f"models/{name}" for name in registry.folder.names("models")) == sorted(one.model for one in promotions[-2:])
    assert registry.folder.names("lineage") == [f"{number:06d}.json" for number in range(1, 5)]


def test_what_the_registry_did_not_make_stays(url: str, candidate: Callable[[int], Path]) -> None:
    """A registry at the root of a project: its `models` hold others' work, also under a name as the registry gives it."""
    registry = Registry(url)
    others = ["models/Qwen2.5-0.5B-Instruct/model.safetensors", "models/20240101-000000-0123abcd/model.safetensors", "made/notes.json"]
    marks = {
        "made/20240101-000000-0123abcd.json": json.dumps({"model": "models/Qwen2.5-0.5B-Instruct"}).encode(),
        "made/a.json": json.dumps({"model": "models/20240101-000000-0123abcd"}).encode(),
        "made/b.json": json.dumps({"model": "models/../elsewhere"}).encode(),
    }
    for name, content in ({name: name.encode() for name in [*others, "elsewhere/x"]} | marks).items():
        registry.folder.replace(name, content)
    promotions = [promote(registry, candidate(number), number - 1 or None, keep=1) for number in range(1, 4)]
    for name in [*others, "elsewhere/x"]:
        assert registry.folder.read(name) == name.encode()
    left = {f"models/{name}" for name in registry.folder.names("models")}
    assert left == {promotions[-1].model, *(str(Path(name).parent) for name in others if name.startswith("models"))}
    assert set(registry.folder.names("made")) == {Path(name).name for name in [*marks, "made/notes.json", f"{promotions[-1].model}.json"]}


def test_a_file_called_current_that_is_not_the_registry_s_stays(url: str, candidate: Callable[[int], Path]) -> None:
    registry = Registry(url)
    registry.folder.replace("current.json", b'{"mine": 1}')
    with pytest.raises(ConfigError, match=r"current\.json is no registry's: give the registry a folder of its own"):
        promote(registry, candidate(1), None)
    assert registry.folder.read("current.json") == b'{"mine": 1}'


def test_a_promotion_that_fails_leaves_nothing(url: str, candidate: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    registry, put = Registry(url), Folder.put

    def failing(self: Folder, source: Path, name: str) -> Content:
        if name.endswith("tokenizer.json"):
            raise ConfigError("the store is full")
        return put(self, source, name)

    monkeypatch.setattr(Folder, "put", failing)
    with pytest.raises(ConfigError, match="the store is full"):
        promote(registry, candidate(1), None)
    assert [name for name in registry.folder.names(below=True) if not name.startswith("lease/")] == []


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "..\\x", "C:/x", "C:x", "", "a\0b", ".", "a/", "./a", "a//b"])
def test_names_that_lead_out_are_damage(url: str, candidate: Callable[[int], Path], tmp_path: Path, name: str) -> None:
    registry = Registry(url)
    promotion = promote(registry, candidate(1), None)
    whole = promotion.model_dump(mode="json")
    content = b"from outside"
    for field, value in (("files", {name: Content.of(content).model_dump()}), ("model", name), ("model", f"models/{name}")):
        registry.folder.replace("lineage/000001.json", json.dumps(whole | {field: value}).encode())
        with pytest.raises(ConfigError, match=r"lineage/000001\.json is damaged: Value error, .*(leads out of|no folder of)"):
            registry.fetch(registry.promotion(1), tmp_path / "scratch" / "deep")
    assert not (tmp_path / "scratch").exists()


def test_a_store_that_ignores_conditional_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(memory())
    registry.probe()
    assert registry.folder.names() == []
    kind = type(registry.folder.fs)
    original = kind.pipe_file
    monkeypatch.setattr(kind, "pipe_file", lambda self, path, value, mode="overwrite", **more: original(self, path, value, **more))
    with pytest.raises(ConfigError, match=r"registry\.url: memory://\w+ ignores conditional writes"):
        registry.probe()
    assert registry.folder.names() == []


def test_a_model_that_vanished_or_is_damaged(url: str, candidate: Callable[[int], Path], tmp_path: Path) -> None:
    registry = Registry(url)
    first, second = promote(registry, candidate(1), None), promote(registry, candidate(2), 1)
    name = f"{second.model}/model.safetensors"
    weights = registry.folder.read(name) or b""
    registry.folder.replace(name, b"\3" * len(weights))
    if not registry.folder.local:  # a local registry is used in place: its files are not read twice
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
            registry.fetch(second, tmp_path / "a")
    registry.folder.replace(name, b"short")
    with pytest.raises(ConfigError, match="has 5 bytes instead of 100000"):
        registry.check_model(second)
    registry.folder.remove(second.model)
    with pytest.raises(ConfigError, match=r"the promoted model 2 has vanished: .*config\.json is missing: restore it, or remove") as caught:
        registry.fetch(second, tmp_path / "b")
    # What the message says works.
    registry.folder.remove(str(caught.value).split("or remove ")[1].split(" to go back")[0].removeprefix(f"{registry.folder.url}/"))
    assert registry.current() == first
    registry.check_model(first)
    assert promote(registry, candidate(3), 1).number == 2


def test_damaged_lineage_is_named(url: str) -> None:
    registry = Registry(url)
    registry.folder.replace("lineage/000001.json", b"{}")
    with pytest.raises(ConfigError, match=r"lineage/000001\.json is damaged: Field required"):
        registry.current()


def test_what_was_rejected_is_remembered_with_parent_data_and_configuration(url: str) -> None:
    registry = Registry(url)
    registry.reject(attempt(1, "monday"))
    tried = registry.rejected(1, "monday", "c")
    assert tried == attempt(1, "monday")
    for other in ((2, "monday", "c"), (None, "monday", "c"), (1, "tuesday", "c"), (1, "monday", "d")):
        assert registry.rejected(*other) is None
    assert registry.current() is None


def test_why_a_night_need_not_train() -> None:
    assert why_skip(0, 1, "u", None, None) == "nothing new under u"
    assert why_skip(0, 1, "u", 3, None) == "nothing new under u since model 3"
    assert why_skip(9, 10, "u", 3, None) == "9 new prompts under u since model 3; data.min_prompts is 10"
    assert why_skip(10, 10, "u", 3, None) is None
    assert "when the same was tried and not promoted (because)" in str(why_skip(10, 10, "u", 3, attempt(3)))


PROMOTER = """
import sys
from pathlib import Path
from tasks.lease import Lease
from tasks.retraining.registry import Attempt, Registry
attempt = Attempt.model_validate_json(sys.argv[3])
registry, directory = Registry(sys.argv[1]), Path(sys.argv[2])
lease = Lease(registry.lease_folder, "loop", 3)
while True:
    current = registry.current()
    number = (current.number if current else 0) + 1
    for path in directory.iterdir():
        path.write_bytes(bytes([number % 256]) * path.stat().st_size)
    lease.acquire()
    registry.repair()
    registry.promote(directory, attempt.model_copy(update={"parent": current.number if current else None}), {}, lease, 3)
    lease.release()
"""


def test_sigkill_in_the_middle_of_promotions(tmp_path: Path, candidate: Callable[[int], Path]) -> None:
    """A process that promotes without pause is killed a few times; readers see whole models before and after."""
    registry = Registry(str(tmp_path / "registry"))
    last = 0
    for delay in (0.003, 0.011, 0.023):
        arguments = [str(tmp_path / "registry"), str(candidate(1)), attempt(None).model_dump_json()]
        process = subprocess.Popen([sys.executable, "-c", PROMOTER, *arguments], cwd=ROOT)
        deadline = time.monotonic() + 60
        while (seen := registry.current()) is None or seen.number < last + 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
        time.sleep(delay)
        process.kill()
        process.wait()
        current = registry.current()
        assert current is not None
        assert current.number >= seen.number
        assert byte_of(registry, current) == current.number % 256
        last = current.number
        assert json.loads(registry.folder.read("current.json") or b"{}")["number"] in (last - 1, last)
        registry.folder.remove("lease")  # the killed one's would expire in three seconds
