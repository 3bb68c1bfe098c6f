"""MLflow: one run of an experiment. Metrics by step, the configuration as parameters, samples as tables, the report as an artifact."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import batched
from typing import Any

from configs.secrets import resolve
from configs.trackers import MlflowConfig
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.base import About, Row, Status, Tracker, table

_ENDED: Mapping[Status, str] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_OTHER = re.compile(r"[^\w\-./: ]", re.ASCII)  # characters that MLflow takes in no name
_PARAMETERS, _LONGEST_PARAMETER = 100, 6000  # mlflow.utils.validation: MAX_PARAMS_TAGS_PER_BATCH, MAX_PARAM_VAL_LENGTH
_STEPS_PER_TABLE = 100  # a table is sent whole when a row comes to it
_WRONG = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


class Mlflow(Tracker):
    """Talks to the server of `config.url`."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def open(self, about: About, before: str | None) -> str:
        from mlflow import MlflowClient

        self._directory = RunDirectory(about.root)
        self._client = MlflowClient(tracking_uri=resolve(self._config.url, "trackers.mlflow.url"))
        self._run = before if before is not None and self._goes_on(before) else self._begin(about)
        return self._run

    def reached(self) -> Mapping[str, int]:
        return {metric.key: metric.step for metric in self._client.get_run(self._run).to_proto().data.metrics}

    def metrics(self, step: int, values: Mapping[str, float | None], at: float) -> None:
        from mlflow.entities import Metric

        # MLflow keeps one of two equal points (name, value, time, step), so this may be repeated.
        points = [Metric(_OTHER.sub("_", name), value, round(at * 1000), step) for name, value in values.items() if value is not None]
        self._client.log_batch(self._run, metrics=points)

    def samples(self, step: int, phase: str, rows: Sequence[Row]) -> None:
        columns, cells = table(rows)
        data = {name: [row[index] for row in cells] for index, name in enumerate(columns)}
        self._client.log_table(self._run, data, f"samples/{phase}-{step // _STEPS_PER_TABLE * _STEPS_PER_TABLE:06d}.json")

    def close(self, status: Status | None) -> None:
        if status is None:
            return
        for path in (self._directory.config, self._directory.summary, self._directory.report):
            if path.exists():
                self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, _ENDED[status])

    def refuses(self, error: Exception) -> bool:
        return super().refuses(error) or getattr(error, "error_code", None) in _WRONG

    def _begin(self, about: About) -> str:
        from mlflow.entities import Param

        tags = {"flow": about.flow, "recipe": about.recipe, "prefect.flow_run": about.flow_run}
        run: str = self._client.create_run(self._experiment(), run_name=about.name, tags=tags).info.run_id
        for some in batched(_parameters(about), _PARAMETERS):
            self._client.log_batch(run, params=[Param(name, value) for name, value in some])
        return run

    def _goes_on(self, run: str) -> bool:
        """Whether the run is still there; then it is running again."""
        from mlflow.exceptions import MlflowException

        try:
            if self._client.get_run(run).info.lifecycle_stage != "active":
                return False
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        self._client.update_run(run, status="RUNNING")
        return True

    def _experiment(self) -> Any:
        from mlflow.exceptions import MlflowException

        name = self._config.experiment
        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException as error:  # another run has made it meanwhile
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = self._client.get_experiment_by_name(name)
            return found.experiment_id if found else None


def _parameters(about: About) -> Iterator[tuple[str, str]]:
    for name, value in (about.config or {}).items():
        yield _OTHER.sub("_", name), str(value)[:_LONGEST_PARAMETER]
