"""Checkpoints on S3: what holds on a disk holds there, and a store that does wrong is one clear error that overwrites nothing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest

from actors.checkpoints.store import CheckpointStore
from actors.storage import Folder
from configs.base import ConfigError
from tasks.lease import Lease
from tests.actors.checkpoints.test_store import (
    PARTS,
    RULES,
    filled,
    manifest_of,
    test_a_draft_that_was_not_published_is_no_checkpoint,
    test_a_step_is_written_once,
    test_a_step_that_is_not_there,
    test_damaged_files_are_refused_by_name,
    test_later_checkpoints_are_withdrawn,
    test_manifests_of_others_are_refused,
    test_one_part_alone,
    test_retention_removes_data_too,
    test_shared_files_are_kept_once,
    test_what_was_written_comes_back,
    write,
)
from tests.actors.test_storage import test_create_read_replace_remove, test_large_files_arrive_whole
from tests.leases import acquired
from tests.object_store import ObjectStore, answers_lost, busy, cut_short, objects, slow, without
from tests.tasks.retraining.test_prompts import test_files_are_found_below_the_url, test_nothing_at_the_url
from tests.tasks.test_lease import test_a_killed_holder_blocks_for_the_lease_only, test_the_second_is_told_who_is_at_work

__all__ = [  # what every store has to do, here on S3
    "objects",
    "test_a_draft_that_was_not_published_is_no_checkpoint",
    "test_a_killed_holder_blocks_for_the_lease_only",
    "test_a_step_is_written_once",
    "test_a_step_that_is_not_there",
    "test_create_read_replace_remove",
    "test_damaged_files_are_refused_by_name",
    "test_files_are_found_below_the_url",
    "test_large_files_arrive_whole",
    "test_later_checkpoints_are_withdrawn",
    "test_manifests_of_others_are_refused",
    "test_nothing_at_the_url",
    "test_one_part_alone",
    "test_retention_removes_data_too",
    "test_shared_files_are_kept_once",
    "test_the_second_is_told_who_is_at_work",
    "test_what_was_written_comes_back",
]


@pytest.fixture
def url(objects: ObjectStore) -> str:
    return f"{objects.bucket()}/place"


@pytest.fixture
def store(url: str, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(url, tmp_path / "scratch")


def test_files_and_copies_are_kept(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"1\n2\n")
    shared = store.keep_file("journal/0.jsonl", b"0\n") | store.keep_copy(tmp_path / "lines", "journal/1.jsonl")
    store.publish(filled(store, 1), manifest_of(1, shared=shared), RULES)
    with store.fetched(store.at(1)) as root:
        assert [(root / name).read_bytes() for name in shared] == [b"0\n", b"1\n2\n"]
    assert not root.exists()
    assert list((tmp_path / "scratch/data").iterdir()) == []  # nor is the draft


def test_a_model_directory_is_copied_in_place_of_the_one_before(store: CheckpointStore, url: str, tmp_path: Path) -> None:
    model = tmp_path / "hf"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "old.json"):
        (model / name).write_bytes(b"one")
    store.mirror(model, "hf")
    (model / "old.json").unlink()
    (model / "model.safetensors").write_bytes(b"two")
    store.mirror(model, "hf")
    there = Folder(f"{url}/hf", "checkpoint.url")
    assert {name: there.read(name) for name in there.names()} == {"config.json": b"one", "model.safetensors": b"two"}
    assert store.steps() == []


def test_removing_leaves_names_that_begin_alike(url: str) -> None:
    folder = Folder(url, "checkpoint.url")
    for name in ("a/1", "ab/1", "a1.json", "a1.json.old"):
        folder.replace(name, b"x")
    folder.remove("a")
    folder.remove("a1.json")
    assert folder.names(below=True) == ["a1.json.old", "ab/1"]


def test_a_folder_that_the_console_made_is_empty(url: str) -> None:
    folder = Folder(url, "checkpoint.url")
    bucket, _, key = folder.root.partition("/")
    boto3.client("s3").put_object(Bucket=bucket, Key=f"{key}/", Body=b"")
    assert folder.names() == folder.names(below=True) == []
    folder.replace("a", b"x")
    assert folder.names() == folder.names(below=True) == ["a"]


# ---- two writers ----


def test_of_many_writers_of_one_name_one_wins(url: str) -> None:
    folder, barrier = Folder(url, "checkpoint.url"), threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        return folder.create("step-000001.json", str(number).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert folder.read("step-000001.json") == str(won.index(True)).encode()


def test_of_two_runs_that_begin_at_once_one_holds_the_lease(url: str) -> None:
    leases = [Lease(Folder(f"{url}/lease", "checkpoint.url"), str(number), 60) for number in range(4)]
    won = acquired(leases)
    assert won.count(True) == 1
    leases[won.index(True)].check()


# ---- a store that does wrong ----


def test_a_store_that_ignores_conditional_writes_is_named(objects: ObjectStore, store: CheckpointStore) -> None:
    store.probe()
    with objects.fault(without("If-None-Match")), pytest.raises(ConfigError, match=r"^checkpoint\.url: s3://.* ignores conditional writes"):
        store.probe()
    assert Folder(store.url, "checkpoint.url").names() == []


def test_a_bucket_that_does_not_exist_is_named_and_not_made(objects: ObjectStore, tmp_path: Path) -> None:
    store = CheckpointStore("s3://nowhere/run", tmp_path)
    with pytest.raises(ConfigError, match=r"^checkpoint\.url: cannot reach s3://nowhere/run: .*bucket does not exist"):
        store.probe()
    with pytest.raises(ConfigError, match=r"bucket does not exist"):
        write(store, 1)
    with pytest.raises(ConfigError, match=r"bucket does not exist"):
        store.keep_file("x", b"x")
    assert "nowhere" not in [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]]


def refuse(url: str, *actions: str) -> None:
    """Nobody may do this in the bucket any more."""
    bucket = url.removeprefix("s3://").partition("/")[0]
    resource = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    rule = {"Effect": "Deny", "Principal": "*", "Action": list(actions), "Resource": resource}
    boto3.client("s3").put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [rule]}))


def test_a_bucket_that_may_not_be_written_is_one_clear_error(store: CheckpointStore) -> None:
    before = write(store, 1)
    refuse(store.url, "s3:PutObject")
    denied = r"^checkpoint\.url: cannot reach s3://[^:]*: PermissionError: \w+"
    for attempt in (store.probe, lambda: write(store, 2), lambda: store.keep_file("a", b"x")):
        with pytest.raises(ConfigError, match=denied) as caught:
            attempt()
        assert len(str(caught.value).splitlines()) == 1
    with store.fetched(before):
        assert store.newest() == before


def test_a_bucket_that_may_not_be_read_is_not_an_empty_one(store: CheckpointStore) -> None:
    write(store, 1)
    refuse(store.url, "s3:ListBucket", "s3:GetObject")
    for attempt in (store.newest, lambda: store.at(1)):
        with pytest.raises(ConfigError, match=r"^checkpoint\.url: cannot reach s3://[^:]*: PermissionError"):
            attempt()


def test_a_store_that_is_slow_is_one_clear_error(objects: ObjectStore, url: str, tmp_path: Path) -> None:
    before = write(CheckpointStore(url, tmp_path / "a"), 1)
    store = CheckpointStore(url, tmp_path / "b", timeout_s=0.3)
    with objects.fault(slow(2.0)):
        for attempt in (store.probe, store.steps, lambda: write(store, 2)):
            with pytest.raises(ConfigError, match=r"^checkpoint\.url: cannot reach s3://[^:]*: TimeoutError: no answer within 0.3 s$"):
                attempt()
    assert CheckpointStore(url, tmp_path / "c").newest() == before


def test_a_store_that_is_slow_but_answers_is_used(objects: ObjectStore, url: str, tmp_path: Path) -> None:
    store = CheckpointStore(url, tmp_path, timeout_s=30)
    with objects.fault(slow(0.05)), store.fetched(write(store, 1)) as root:
        assert (root / store.at(1).folder / "policy/.metadata").read_bytes() == PARTS["policy/.metadata"]


def test_a_store_that_is_gone_is_one_clear_error(objects: ObjectStore, url: str, tmp_path: Path) -> None:
    wanted = r"^checkpoint\.url: cannot reach s3://[^:]*: EndpointConnectionError: .*127\.0\.0\.1:1"
    with objects.gone(), pytest.raises(ConfigError, match=wanted):
        CheckpointStore(url, tmp_path).probe()


@pytest.mark.parametrize("times", [1, 99])
def test_a_name_whose_answer_was_lost_is_ours(objects: ObjectStore, url: str, times: int) -> None:
    """s3fs asks again, and is told that the name is taken: by itself. Or it gives up, and the file is there all the same."""
    folder = Folder(url, "checkpoint.url")
    with objects.fault(answers_lost("PUT", times)):
        assert folder.create("step-000001.json", b"mine")
    assert not folder.create("step-000001.json", b"yours")
    assert folder.read("step-000001.json") == b"mine"


def test_a_store_that_is_busy_is_asked_again(objects: ObjectStore, store: CheckpointStore) -> None:
    with objects.fault(busy(times=3)):
        store.probe()


def test_a_file_that_is_cut_short_on_its_way_is_refused(objects: ObjectStore, store: CheckpointStore) -> None:
    written = write(store, 1)
    with (
        objects.fault(cut_short("policy/a.distcp")),
        pytest.raises(ConfigError, match=r"^checkpoint\.url: cannot reach s3://.*: \w+: "),
        store.fetched(written),
    ):
        raise AssertionError("never")
    with store.fetched(written):
        pass
