"""Which run of each tracker a resumed run goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.checkpoints.manifest import Manifest
from actors.checkpoints.store import CheckpointStore
from configs.checkpoint import CheckpointConfig
from configs.loader import load
from configs.run import RunConfig
from flows.resume import origin_of
from flows.saving import Saving
from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory


def saved(url: str, scratch: Path, of: RunConfig) -> None:
    """A checkpoint of step 4 by a run whose trackers were at work."""
    store = CheckpointStore(url, scratch)
    draft = store.draft(4)
    (draft.directory / "run/trackers").mkdir(parents=True)
    (draft.directory / "run/trackers/mlflow.json").write_text('{"run": "one", "sent": {"loss": 4}}')
    (draft.directory / "run/metrics.jsonl").write_text('{"step": 4}\n')
    manifest = Manifest(
        flow="grpo", run="r", step=4, weight_version=4, shape="s", config=of.model_dump(mode="json"), packages={}, folder=draft.folder,
        files={},
    )  # fmt: skip
    store.publish(draft, manifest, CheckpointConfig())


@pytest.mark.parametrize(
    ("there", "own", "expected"),
    [
        (["checkpoint.url={url}"], None, '{"run": "one", "sent": {"loss": 4}}'),  # the same run, on another machine
        (["checkpoint.url={url}"], "later", "later"),  # in its own directory: it knows what was sent since
        (["resume=fork:{url}"], None, None),
        (["resume=fork:{url}", "checkpoint.url={url}"], None, None),
        (["resume={url}"], None, None),  # a run of its own, with checkpoints of its own
    ],
)
def test_it_goes_on_where_it_is_the_same_run(tmp_path: Path, there: list[str], own: str | None, expected: str | None) -> None:
    url = str(tmp_path / "saved")
    config = load("arithmetic-cpu", [f"output_dir={tmp_path}/runs", *(one.format(url=url) for one in there)])
    saved(url, tmp_path, config)
    directory = RunDirectory.create(config.output_dir, "next")
    if own is not None:
        directory.trackers.mkdir()
        (directory.trackers / "mlflow.json").write_text(own)
    saving = Saving(config, directory, "mine", origin_of(config, "mine", tmp_path))
    with saving.source() as root:
        saving.restore_lines(root)
    kept = directory.trackers / "mlflow.json"
    assert (kept.read_text() if kept.exists() else None) == expected
    assert read_lines(directory.metrics) == [{"step": 4}]
