"""What a run goes on from: by flow run, by directory, by URL; and what it must keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.checkpoints.errors import CheckpointError
from actors.checkpoints.manifest import Manifest
from actors.checkpoints.store import CheckpointStore
from actors.data_plane.address import DataPlaneAddress, Endpoint
from configs.base import ConfigError
from configs.checkpoint import CheckpointConfig
from configs.continuity import differences
from configs.loader import load
from configs.run import RunConfig
from flows.grpo_session import GrpoSession
from flows.resume import Mark, Origin, origin_of
from flows.training_session import TooManyRerunsError
from tasks.handles import RunActors
from tasks.reporting.run_dir import RunDirectory

RULES = CheckpointConfig(keep_last=9)


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load("arithmetic-cpu", [f"output_dir={tmp_path}/runs", *overrides])


def run(tmp_path: Path, flow_run: str, *steps: int, url: str = "", of: RunConfig | None = None) -> RunDirectory:
    """A directory of a run that has saved after these steps."""
    directory = RunDirectory.create(tmp_path / "runs", "arithmetic-cpu")
    url = url or str(directory.checkpoints)
    Mark(flow_run=flow_run, checkpoints=url).write(directory)
    save(CheckpointStore(url, tmp_path), of or config(tmp_path), *steps)
    return directory


def save(store: CheckpointStore, of: RunConfig, *steps: int) -> None:
    for step in steps:
        draft = store.draft(step)
        (draft.directory / "file").write_text("x")
        manifest = Manifest(
            flow="grpo", run="r", step=step, weight_version=step, shape="s", config=of.model_dump(mode="json"), packages={},
            folder=draft.folder, files={},
        )  # fmt: skip
        store.publish(draft, manifest, RULES)


def found(origin: Origin | None) -> tuple[int | None, str | None]:
    assert origin is not None
    return origin.step, origin.directory.root.name if origin.directory else None


def test_a_new_run_goes_on_from_nothing(tmp_path: Path) -> None:
    run(tmp_path, "another", 5)
    assert origin_of(config(tmp_path), "mine", tmp_path) is None


def test_a_second_try_of_a_flow_run_goes_on_in_its_directory(tmp_path: Path) -> None:
    run(tmp_path, "another", 9)
    run(tmp_path, "mine", 5, 6)
    assert found(origin_of(config(tmp_path), "mine", tmp_path)) == (6, "arithmetic-cpu-2")
    assert origin_of(config(tmp_path, "resume=never"), "mine", tmp_path) is None


def test_a_try_before_that_saved_nothing_is_begun_again_in_its_directory(tmp_path: Path) -> None:
    old = run(tmp_path, "dead", 5)
    run(tmp_path, "mine")
    assert found(origin_of(config(tmp_path), "mine", tmp_path)) == (None, "arithmetic-cpu-2")
    assert found(origin_of(config(tmp_path, f"resume=fork:{old.root}"), "mine", tmp_path)) == (5, "arithmetic-cpu-2")


def test_of_several_tries_the_one_with_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    run(tmp_path, "mine")
    run(tmp_path, "mine", 4, 6)
    run(tmp_path, "mine", 5)
    run(tmp_path, "mine")
    assert found(origin_of(config(tmp_path), "mine", tmp_path)) == (6, "arithmetic-cpu-2")


def test_starts_are_counted_until_there_is_a_new_checkpoint(tmp_path: Path) -> None:
    directory = run(tmp_path, "mine")

    def starts() -> int:
        origin = origin_of(config(tmp_path), "mine", tmp_path)
        assert origin is not None
        Mark(flow_run="mine", checkpoints=str(directory.checkpoints), step=origin.step, starts=origin.starts("mine")).write(directory)
        return origin.starts("mine") - 1

    assert [starts(), starts()] == [2, 3]
    save(CheckpointStore(str(directory.checkpoints), tmp_path), config(tmp_path), 5)
    assert [starts(), starts()] == [1, 2]


def test_a_url_that_holds_checkpoints(tmp_path: Path) -> None:
    url = f"{tmp_path}/elsewhere"
    save(CheckpointStore(url, tmp_path), config(tmp_path), 4)
    assert found(origin_of(config(tmp_path, f"checkpoint.url={url}"), "mine", tmp_path)) == (4, None)


def test_a_directory_its_checkpoints_and_a_manifest(tmp_path: Path) -> None:
    directory = run(tmp_path, "dead", 5, 7)
    for where, expected in (
        (directory.root, (7, "arithmetic-cpu")),
        (directory.checkpoints, (7, "arithmetic-cpu")),
        (f"{directory.checkpoints}/step-000007.json", (7, "arithmetic-cpu")),
        (f"{directory.checkpoints}/step-000005.json", (5, None)),
        (f"fork:{directory.root}", (7, None)),
    ):
        assert found(origin_of(config(tmp_path, f"resume={where}"), "mine", tmp_path)) == expected, where


def test_a_second_try_of_a_run_that_was_resumed_by_name_goes_on_from_its_own(tmp_path: Path) -> None:
    old = run(tmp_path, "dead", 5)
    run(tmp_path, "mine", 8)
    assert found(origin_of(config(tmp_path, f"resume={old.root}"), "mine", tmp_path)) == (8, "arithmetic-cpu-2")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume: .*nowhere holds no checkpoint"):
        origin_of(config(tmp_path, f"resume={tmp_path}/nowhere"), "mine", tmp_path)
    directory = run(tmp_path, "dead", 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint after step 6 \(there are: 5\)"):
        origin_of(config(tmp_path, f"resume={directory.checkpoints}/step-000006.json"), "mine", tmp_path)


def test_other_settings_are_named_and_a_fork_may_have_them(tmp_path: Path) -> None:
    directory = run(tmp_path, "dead", 5)
    changed = config(tmp_path, f"resume={directory.root}", "policy.optimizer.lr=1", "seed=3")
    with pytest.raises(ConfigError, match=r"seed: 0 -> 3; policy.optimizer.lr: .* -> 1.0.*flows\.fork"):
        origin_of(changed, "mine", tmp_path)
    fork = config(tmp_path, f"resume=fork:{directory.root}", "policy.optimizer.lr=1")
    assert found(origin_of(fork, "mine", tmp_path)) == (5, None)


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("policy.parallel.tensor=2", True), ("policy.device=cpu", True), ("steps=999", True), ("generation.num_engines=3", True),
        ("checkpoint.every_steps=7", True), ("name=other", True), ("validate_every=3", True), ("logged_samples=1", True),
        ("policy.loss.kl_coef=0.5", False), ("rollout.temperature=0.5", False), ("environment.validation_size=7", False),
        ("warm_start.steps=1", False), ("policy.updates_per_step=1", False), ("model.hidden_size=32", False),
    ],
)  # fmt: skip
def test_how_may_change_and_what_may_not(override: str, kept: bool) -> None:
    before, now = (load("arithmetic-cpu", overrides).model_dump(mode="json") for overrides in ([], [override]))
    assert (differences(before, now) == []) is kept, differences(before, now)


def test_marks_of_something_else_are_none(tmp_path: Path) -> None:
    assert Mark.read(tmp_path) is None
    for content in (b"", b"{", b"[]", b'{"flow_run": 1, "checkpoints": "x"}', b"\xff"):
        (tmp_path / "run.json").write_bytes(content)
        assert Mark.read(tmp_path) is None


def test_a_flow_run_whose_process_ends_again_and_again_ends_with_one_error(tmp_path: Path) -> None:
    def start() -> Path:
        session = GrpoSession(config(tmp_path, "recovery.reruns=2"), "arithmetic-cpu")
        session.flow_run = "mine"
        with session._stack:
            return session._choose_directory().root

    first = start()
    assert [start(), start()] == [first, first]
    message = r"from the beginning 3 times, and its process ended before the next checkpoint each time \(recovery\.reruns = 2\)"
    for _ in range(2):
        with pytest.raises(TooManyRerunsError, match=message):
            start()
    save(CheckpointStore(str(first / "checkpoints"), tmp_path), config(tmp_path), 5)
    assert start() == first


def test_the_refit_of_a_resume_is_no_part_of_the_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = GrpoSession(config(tmp_path), "arithmetic-cpu")
    session.actors = RunActors("there", DataPlaneAddress("there", Endpoint("controller", "server", "host", ()), ()), ["engine-0"], {})
    monkeypatch.setattr("flows.grpo_session.refit", lambda *arguments: {"weight_version": 7})
    session._take_over(session._state(3))
    assert (session.weight_version, dict(session.seconds)) == (7, {})  # `resume` takes the time
    session.refit()
    assert list(session.seconds) == ["warm_start"]
