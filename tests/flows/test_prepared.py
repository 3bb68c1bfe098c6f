"""A model is written once: what the command line prepared is what its flow begins with."""

from __future__ import annotations

from pathlib import Path

from configs.loader import load
from flows.grpo_session import GrpoSession
from flows.prepared import handed, taken


def test_the_flow_takes_over_what_the_command_prepared_once(tmp_path: Path) -> None:
    config, other = (load("arithmetic-cpu", [f"seed={seed}"]) for seed in (1, 2))
    scratch, run = tmp_path / "scratch", tmp_path / "run" / "model"
    found = GrpoSession.prepare(config, scratch)
    written = {path.name: path.read_bytes() for path in scratch.iterdir()}
    run.mkdir(parents=True)
    (run / "config.json").write_text("of a run that is resumed")
    with handed(config, found, scratch):
        assert taken(other, run) is None
        now = taken(load("arithmetic-cpu", ["seed=1"]), run)
        assert (now.model_path, now.steps) == (str(run), found.steps) if now else False
        assert {path.name: path.read_bytes() for path in run.iterdir()} == written
        assert taken(config, run) is None
    with handed(config, found, scratch):
        pass
    assert taken(config, run) is None


def test_a_model_that_was_not_written_for_the_run_stays_where_it_is(tmp_path: Path) -> None:
    config = load("arithmetic-cpu")
    found = GrpoSession.prepare(config, tmp_path / "mine")
    with handed(config, found, tmp_path / "scratch"):
        assert taken(config, tmp_path / "run") == found
    assert not (tmp_path / "run").exists()
