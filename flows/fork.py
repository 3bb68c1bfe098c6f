"""Fork a run: a child goes on from one of its checkpoints with other settings, and is compared with it step by step.

    parent's checkpoint ─► grpo (the child, a subflow: the same remaining prompts and seeds) ─► paired comparison

python -m flows.fork runs/arithmetic-cpu --at 120 policy.optimizer.lr=5e-5
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from actors.checkpoints.manifest import manifest_name
from actors.checkpoints.store import CheckpointStore
from configs.base import ConfigError
from configs.loader import load
from flows.arguments import parse
from flows.cli import exit_code
from flows.grpo import grpo
from flows.resume import Mark
from flows.served import flow
from tasks.reporting.fork import Comparison, changed_settings, compare, markdown
from tasks.reporting.html import write_report
from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory


@flow(name="fork", flow_run_name="fork-of-{run}-after-{at}", validate_parameters=False)
def fork(run: str, at: int | None = None, overrides: list[str] | None = None) -> dict[str, Any]:
    """Train a child of a run from one of its checkpoints, with other settings. Returns the paired comparison.

    Args:
        run: directory of the parent. at: step of the checkpoint; default: its newest.
        overrides: dotted.field=value, on top of the parent's settings.

    Raises:
        ConfigError, CheckpointError: no such run, checkpoint or setting.
    """
    parent = RunDirectory(Path(run).resolve())
    url, step = checkpoint_of(parent, at)
    where = [f"output_dir={parent.root.parent}", "checkpoint.url=null", f"resume=fork:{url}/{manifest_name(step)}"]
    child = RunDirectory(Path(grpo(recipe=str(parent.config), overrides=[*where, *(overrides or ())])["directory"]))
    before, now = (load(str(directory.config)).model_dump(mode="json") for directory in (parent, child))
    comparison = Comparison(
        parent=parent.root.name,
        at=step,
        changed=changed_settings(before, now),
        changes=compare(read_lines(parent.metrics), read_lines(child.metrics), step),
    )
    child.comparison.write_text(comparison.model_dump_json(indent=2) + "\n")
    write_report(child)
    create_markdown_artifact(key="grpo-fork", markdown=markdown(comparison), description=f"{child.root.name} against {parent.root.name}")
    return comparison.model_dump()


def checkpoint_of(run: RunDirectory, at: int | None) -> tuple[str, int]:
    """The URL of a run's checkpoints, and the step of the one to take.

    Raises:
        ConfigError: no run, or no checkpoint of it. CheckpointError: not this one.
    """
    mark = Mark.read(run.root)
    if mark is None:
        raise ConfigError(f"{run.root} is no directory of a run (it has no run.json)")
    store = CheckpointStore(mark.checkpoints, run.root)
    manifest = store.newest() if at is None else store.at(at)
    if manifest is None:
        raise ConfigError(f"{run.root}: the run has no checkpoint")
    return mark.checkpoints, manifest.step


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong input."""
    from flows.service.server import prefect_server

    options = parse("fork", arguments)

    def work() -> int:
        checkpoint_of(RunDirectory(Path(options.run).resolve()), options.at)
        with prefect_server() as url:
            print(f"Prefect UI: {url}")
            found = fork(options.run, options.at, options.overrides)
        print(markdown(Comparison.model_validate(found)))
        return 0

    return exit_code(work)


if __name__ == "__main__":
    raise SystemExit(main())
