"""Where the files of a run are.

runs/
├── arithmetic-cpu/       config.yaml  metrics.jsonl  samples.jsonl  slowest.jsonl  summary.json  report.html  tensorboard/  hf/
├── sft-cpu/              the same but for samples.jsonl and slowest.jsonl, and checkpoints/; hf is a link to the best of them
├── arithmetic-cpu-2/     the same recipe, run again
└── latest -> arithmetic-cpu-2
"""

from __future__ import annotations

import os
from pathlib import Path

from configs.run import LATEST


class RunDirectory:
    """The directory of one run.

    Attributes:
        root: absolute, because actors (which have another working directory) write here as well.
        config: the resolved configuration, YAML. summary: the run in a few numbers (`summary.Summary`). report: HTML.
        metrics, samples, slowest: one JSON object per line (`trackers.jsonl.JsonLines`, `SlowestWriter`).
        tensorboard: directory of TensorBoard event files, with the same values as `metrics`.
        trackers: one file for each further tracker: the id of its run, and what was sent (`trackers.outbox`).
        hf: directory of the trained policy in Hugging Face format. hf_best: of the best checkpoint, when that is another.
        journal: one line for each transition of the ledger (`actors.rollout.journal`).
        losses: what died during the run, one JSON object per line. comparison: of a forked run with its parent (`fork.Comparison`).
        inputs: what steps were made from (`actors.rollout.inputs`).
        ray_logs: what the processes of a failed run's own Ray said.
        checkpoints: where checkpoints are kept unless `checkpoint.url` says otherwise.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config, self.summary, self.report = root / "config.yaml", root / "summary.json", root / "report.html"
        self.metrics, self.samples, self.slowest = root / "metrics.jsonl", root / "samples.jsonl", root / "slowest.jsonl"
        self.tensorboard, self.checkpoints, self.inputs = root / "tensorboard", root / "checkpoints", root / "inputs"
        self.ray_logs, self.trackers = root / "ray-logs", root / ".trackers"
        self.hf, self.hf_best = root / "hf", root / "hf-best"
        self.journal, self.comparison, self.losses = root / "journal.jsonl", root / "comparison.json", root / "losses.jsonl"

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> RunDirectory:
        """Make `output_dir/name`, or the first free of name-2, name-3, ...: nothing is overwritten.

        Raises:
            ValueError: a name that is not one path component, or is `latest`.
            FileExistsError: `output_dir/latest` exists and is not a symbolic link.
        """
        if name in ("", ".", "..", LATEST) or Path(name).name != name:
            raise ValueError(f"name: {name!r} cannot name a run directory")
        parent = Path(output_dir).resolve()
        parent.mkdir(parents=True, exist_ok=True)
        link = parent / LATEST
        if link.exists() and not link.is_symlink():
            raise FileExistsError(f"{link} is not a symbolic link: move it away, the link to the last run goes there")
        return cls(_claim(parent, name))


def _claim(parent: Path, name: str) -> Path:
    number = 1
    while True:
        root = parent / (name if number == 1 else f"{name}-{number}")
        try:
            root.mkdir()  # atomic: of two runs that start together each gets its own
        except FileExistsError:
            number += 1
        else:
            return root


def point_latest(directory: RunDirectory) -> None:
    """Have `latest` point to the run, once there is something in it. Not for a run that makes no model: `latest/hf` is the newest one."""
    point(directory.root.parent / LATEST, directory.root)


def point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to a directory beside or below it, in place of the link that is there."""
    # A link cannot be rewritten in place; a rename over it is atomic. Relative, so that the tree may be moved.
    fresh = link.with_name(f".{link.name}-{target.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.relative_to(link.parent), target_is_directory=True)
    os.replace(fresh, link)
