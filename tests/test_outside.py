"""Every file from outside is used, or refused in one line by an error of the project's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest
from actors.checkpoints.store import CheckpointStore
from actors.environments.dataset.rows import Rows
from actors.environments.rewards.endpoint import Endpoint, JudgeError
from actors.environments.scoring.verdict import Part
from actors.environments.scoring.wire import Lines, WireError, message, read_part
from actors.models.hf import check_model_dir, tensor_shapes
from actors.rollout.examples import read_rows
from actors.storage import Folder
from configs.base import ConfigError
from configs.environment import FieldsConfig
from configs.loader import RECIPES, load
from configs.retrain import RetrainConfig
from configs.rewards import JudgeReward
from configs.run import RunConfig
from configs.sft import SftConfig
from flows.resume import Mark, origin_of
from tasks.lease import BusyError, Lease
from tasks.reporting.jsonl import read_lines
from tasks.retraining.decision import Scores
from tasks.retraining.prompts import find_new, read_frozen
from tasks.retraining.registry import Attempt, Registry
from tests.actors.policy import tiny
from tests.outside import BYTES, DEEP, JSON, mutated
from tests.stores import memory

often = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
ROOTS = {"arithmetic-cpu": RunConfig, "sft-cpu": SftConfig, "retrain-cpu": RetrainConfig}
RECIPE = {name: yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in ROOTS}
YAML = [
    "a: 2020-13-45", "a: !!binary x", "? [a]\n: b", "? {a: b}\n: c", "&a [*a]", "a: &a {b: *a}", "1: 2", "null: 1", "steps: &a [*a]",
    "flow: [grpo]", "flow: {a: b}", "model: &a {model: *a}", "a: 1:99:99", "a: !!python/object:os.system x", "a: !!timestamp x",
    "steps: 0b", "steps: 0x", "steps: 1_", "steps: !!float x", "<<: 1", "<<: [1]", "model: {<<: {a: 1}}", "a: !!set {x}", "a: !!omap [x]",
    "data: &a {train: *a}", "environment: &a {sources: [*a]}", "policy: {loss: 2020-01-01}", "\ufeffsteps: 1", "\u0085", "%TAG",
    "a: !!pairs [1]", "a: !!int x", "--- a\n--- b",
]  # fmt: skip


def refused(read: Callable[[], object], *own: type[Exception]) -> None:
    """It is read, or refused by one of these: anything else fails the test."""
    with suppress(*own):
        read()


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_texts_that_yaml_has_its_own_ideas_of(tmp_path: Path) -> None:
    laughs = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" if n else "l0: &l0 [x]\n" for n in range(10))
    for text in (*(text.encode() for text in YAML), *DEEP, b"\xff", b"\x00", laughs.encode(), f"{laughs}steps: *l9".encode()):
        (tmp_path / "a.yaml").write_bytes(text)
        refused(lambda: load(str(tmp_path / "a.yaml")), ConfigError)
        refused(lambda text=text: load("arithmetic-cpu", [f"steps={text.decode('latin-1')}"]), ConfigError)


@settings(often, max_examples=30)
@given(name=st.sampled_from(sorted(ROOTS)), data=st.data())
def test_recipes(name: str, data: st.DataObject, tmp_path: Path) -> None:
    texts = st.binary() | mutated(RECIPE[name]).map(dumped)
    (tmp_path / "a.yaml").write_bytes(data.draw(texts))
    refused(lambda: load(str(tmp_path / "a.yaml"), (), ROOTS[name]), ConfigError)


@settings(often, max_examples=30)
@given(name=st.sampled_from(["steps", "model", "model.path", "a.b", "policy.loss.x", "", ".", "environment.sources", "1"]), data=st.data())
def test_overrides(name: str, data: st.DataObject) -> None:
    text = data.draw(st.text(max_size=20) | JSON.map(json.dumps))
    refused(lambda: load("arithmetic-cpu", [f"{name}={text}"]), ConfigError)


@pytest.mark.parametrize("name", ["x" * 5000 + ".yaml", "\x00.yaml", "x" * 5000, "\x00", "\ud800"])
def test_names_of_recipes(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no file|no recipe"):
        load(name)


ROW = {
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1"}],
    "answer": 2,
    "extra": {"a": [1, None, {"b": "c"}]},
}
LINES = st.lists(BYTES | JSON.map(dumped) | mutated(ROW).map(dumped) | st.just(dumped(ROW)), max_size=3).map(b"\n".join)


def all_rows(path: Path) -> None:
    rows = Rows.read(str(path), "environment.path")
    for index in range(len(rows)):
        rows.problem(index, FieldsConfig())


@often
@given(content=LINES, suffix=st.sampled_from([".jsonl", ".json", ".parquet"]))
def test_data_sets(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    refused(lambda: all_rows(path), ConfigError)
    refused(lambda: read_rows(str(path), "prompt", "answer", "data.train"), ConfigError)
    refused(lambda: read_frozen(str(path), FieldsConfig()), ConfigError)
    refused(lambda: find_new({"a": content}, {}, set(), FieldsConfig()), ConfigError)


@often
@given(pair=st.tuples(st.text(), st.text()) | st.sampled_from([("\ud800", "a"), ("a", "\udfff")]))
def test_what_is_read_to_be_learned_can_be_encoded(pair: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(dumped({"prompt": pair[0], "answer": pair[1]}))
    with suppress(ConfigError):
        for one in read_rows(str(path), "prompt", "answer", "data.train"):
            assert one.question.encode()[:0] == one.answer.encode()[:0] == b""


SAVED_STATE = {"state.json": {"_data_files": [{"filename": "data-0.arrow"}], "_fingerprint": "0", "_format_type": None, "_split": None}}


@often
@given(data=st.data())
def test_folders_of_save_to_disk(data: st.DataObject, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir(exist_ok=True)
    for name, valid in {**SAVED_STATE, "dataset_info.json": {"features": {"prompt": {"dtype": "string", "_type": "Value"}}}}.items():
        (tmp_path / "saved" / name).write_bytes(data.draw(BYTES | mutated(valid).map(dumped)))
    refused(lambda: all_rows(tmp_path / "saved"), ConfigError)


def manifest(tmp_path: Path) -> Any:
    content = {"size": 1, "sha256": "0"}
    one = Manifest(
        flow="grpo", run="r", step=1, weight_version=1, score=0.5, shape="s", packages={"torch": "1"}, folder="data/x", journal=(3, "h"),
        files={"run/a": content}, shared={"reference/a": content}, config=load("arithmetic-cpu").model_dump(mode="json"),
    )  # fmt: skip
    return one.model_dump(mode="json")


@often
@given(data=st.data())
def test_manifests(data: st.DataObject, tmp_path: Path) -> None:
    valid = manifest(tmp_path)
    store = CheckpointStore(str(tmp_path / "saved"), tmp_path)
    folder = Folder(store.url, "checkpoint.url")
    folder.replace("data/x/run/a", b"0")
    folder.replace(
        "step-000001.json",
        data.draw(BYTES | mutated(valid).map(dumped) | mutated(valid["config"]).map(lambda c: dumped(valid | {"config": c}))),
    )
    config = load("arithmetic-cpu", [f"output_dir={tmp_path}/runs", f"checkpoint.url={store.url}"])

    def go_on() -> None:
        origin = origin_of(config, "mine", tmp_path)
        assert origin is not None
        with store.fetched(origin.manifest):
            pass

    refused(go_on, ConfigError, CheckpointError)
    with suppress(CheckpointError):
        store.withdraw_after(0)
    assert folder.info() is not None


def test_a_manifest_cannot_name_the_whole_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leads out of"):
        Manifest.parse(dumped(manifest(tmp_path) | {"folder": "."}), "here")


@pytest.mark.parametrize("name", ["step-٠٠٠٠٠٩.json", "step-0000009.json"])
def test_a_name_that_is_almost_a_manifest_s_is_not_looked_at(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"{}")
    assert CheckpointStore(str(tmp_path), tmp_path).newest() is None


@often
@given(data=st.data())
def test_marks_and_leases(data: st.DataObject, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(data.draw(BYTES | mutated({"flow_run": "a", "checkpoints": str(tmp_path)}).map(dumped)))
    found = Mark.read(tmp_path)
    if found is not None:
        config = load("arithmetic-cpu", [f"output_dir={tmp_path}/runs", f"resume={tmp_path}"])
        refused(lambda: origin_of(config, "mine", tmp_path / "scratch"), ConfigError, CheckpointError)
    folder = Folder(memory(), "checkpoint.url")
    record = {"holder": "a", "nonce": "b", "expires_at": 1.0, "released": False}
    folder.replace("000001.json", data.draw(BYTES | mutated(record).map(dumped)))
    refused(lambda: Lease(folder, "b", 10).acquire(), BusyError)


@often
@given(data=st.data())
def test_registries(data: st.DataObject) -> None:
    registry, scores = Registry(memory()), Scores(accuracy=0.5, reward=0.5)
    attempt = Attempt(
        parent=None, run_id="r", time="t", prompts=1, data_hash="d", config_hash="c", frozen_hash="f", metric="accuracy", old=scores,
        new=scores, reason="r",
    )  # fmt: skip
    registry.reject(attempt)
    (name,) = registry.folder.names("rejected")
    valid = attempt.model_dump(mode="json")
    registry.folder.replace(f"rejected/{name}", data.draw(BYTES | mutated(valid).map(dumped)))
    refused(lambda: registry.rejected(None, "d", "c"), ConfigError)
    valid |= {"number": 1, "model": "models/a", "files": {"x": {"size": 1, "sha256": "0"}}, "consumed": {}}
    registry.folder.replace("lineage/000001.json", data.draw(BYTES | mutated(valid).map(dumped)))
    refused(registry.current, ConfigError)


@often
@given(data=st.data())
def test_answers_of_scoring_processes(data: st.DataObject) -> None:
    valid = {"call": 1, "value": 0.5, "outcome": "scored", "seconds": 0.1, "error": ""}
    content = data.draw(BYTES | JSON.map(dumped) | mutated(valid).map(dumped))

    def read() -> None:
        for values in Lines().feed(content + b"\n"):
            assert isinstance(read_part(values), Part)

    refused(read, WireError)
    assert Lines().feed(message(**valid)) == [valid]


@pytest.mark.parametrize("seconds", [10**400, float("nan"), float("inf"), True, None])
def test_a_scoring_process_that_took_no_time_of_this_world(seconds: Any) -> None:
    with pytest.raises(WireError, match="malformed"):
        read_part({"value": 0.5, "outcome": "scored", "seconds": seconds, "error": ""})


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint(JudgeReward(url="http://127.0.0.1:1/v1", model="m"), None)


@often
@given(data=st.data())
def test_replies_of_judges(endpoint: Endpoint, data: st.DataObject) -> None:
    content = data.draw(BYTES | JSON.map(dumped) | mutated({"choices": [{"message": {"content": "7"}}]}).map(dumped))
    refused(lambda: endpoint._reply(httpx.Response(200), content), JudgeError)


@often
@given(content=st.lists(BYTES | JSON.map(dumped), max_size=3).map(b"\n".join))
def test_lines_of_a_run(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    found: list[Any] = []
    refusal = ""
    try:
        found = read_lines(path)
    except ValueError as error:
        refusal = str(error)
    assert all(isinstance(row, dict) for row in found)
    assert refusal == "" or f"{path}, line " in refusal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("outside") / "model", "qwen3", tied=True, vocab=16)


@settings(often, max_examples=40)
@given(data=st.data())
def test_model_directories(model: Path, data: st.DataObject, tmp_path: Path) -> None:
    valid = json.loads((model / "config.json").read_text())
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    weights = (model / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data.draw(BYTES | st.integers(0, len(weights)).map(lambda end: weights[:end])))
    (directory / "config.json").write_bytes(data.draw(BYTES | mutated(valid).map(dumped) | st.just(dumped(valid))))
    index = data.draw(st.none() | BYTES | mutated({"metadata": {}, "weight_map": {"a": "model.safetensors"}}).map(dumped))
    if index is None:
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    else:
        (directory / "model.safetensors.index.json").write_bytes(index)
    refused(lambda: check_model_dir(str(directory)), ConfigError)
    refused(lambda: tensor_shapes(str(directory)), ConfigError)
