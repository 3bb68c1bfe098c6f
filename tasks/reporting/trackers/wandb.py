"""Weights & Biases: one run of a project. Metrics by step, the configuration, samples as tables; online, or in files for `wandb sync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.trackers import WandbConfig
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.base import About, Row, Status, Tracker, table

_EXIT_CODES: Mapping[Status, int] = {"completed": 0, "failed": 1, "cancelled": 130}
_START_S, _END_S = 30.0, 20.0


class Wandb(Tracker):
    """What is sent is what the tracker is given: no source code, no console, no git address."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def open(self, about: About, before: str | None) -> str:
        import wandb

        settings = wandb.Settings(
            console="off", disable_code=True, save_code=False, disable_git=True, silent=True,
            init_timeout=_START_S, finish_timeout=_END_S,
        )  # fmt: skip
        config = self._config
        self._run = wandb.init(
            project=config.project, entity=config.entity, group=config.group, tags=config.tags, mode=config.mode,
            dir=about.root, name=about.name, id=before, resume="allow" if before else None,
            config={**(about.config or {}), "recipe": about.recipe, "prefect.flow_run": about.flow_run}, job_type=about.flow,
            reinit="create_new", settings=settings, allow_val_change=True,
        )  # fmt: skip
        self._directory = RunDirectory(about.root)
        return str(self._run.id)

    def metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        import wandb

        columns, cells = table(rows)
        self._run.log({f"samples/{phase}": wandb.Table(columns=[*columns], data=cells)}, step=step)

    def close(self, status: Status | None) -> None:
        import wandb

        if status is not None and self._directory.report.exists():
            self._run.log({"report": wandb.Html(self._directory.report.read_text(encoding="utf-8"), inject=False)})
        self._run.finish(exit_code=0 if status is None else _EXIT_CODES[status])

    def refuses(self, error: Exception) -> bool:
        from wandb.errors import UsageError

        return super().refuses(error) or isinstance(error, UsageError)  # there is no key, say
