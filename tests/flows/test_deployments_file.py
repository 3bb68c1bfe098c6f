"""prefect.yaml: what it holds can be deployed anywhere, and says what a person needs to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.events import AutomationCore
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.workers.process import ProcessWorker

from configs.loader import load
from flows.evaluate_session import EvaluateSession
from flows.grpo_session import GrpoSession
from flows.night import Night
from flows.service.automations import RESUME_CRASHED
from flows.sft_session import SftSession
from tests.conftest import ROOT

TEXT = (ROOT / "prefect.yaml").read_text()
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(TEXT)["deployments"]
CONFIGS: dict[str, Any] = {one.flow: one.config_type for one in (GrpoSession, SftSession, EvaluateSession, Night)}
NAMES = [f"{deployment['entrypoint'].rpartition('.')[2]}/{deployment['name']}" for deployment in DEPLOYMENTS]
deployments = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@deployments
def test_entrypoint_is_a_flow_that_takes_the_parameters(deployment: dict[str, Any]) -> None:
    flow: Flow[..., Any] = load_flow_from_entrypoint(deployment["entrypoint"])
    assert flow.name == deployment["entrypoint"].rpartition(".")[2]
    form = flow.parameters.model_dump()
    assert set(deployment["parameters"]) <= set(form["properties"])
    for name, field in form["properties"].items():  # what a person reads beside the field
        assert field.get("description"), name


@deployments
def test_each_says_what_it_is_and_runs_one_at_a_time(deployment: dict[str, Any]) -> None:
    assert deployment["description"]
    assert deployment["tags"]
    assert deployment["enforce_parameter_schema"] is True
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["work_pool"]["name"] == "grpo"
    for schedule in [*deployment.get("schedules", []), *filter(None, [deployment.get("schedule")])]:
        assert schedule["active"] is False  # a person turns it on
        assert schedule["timezone"]
        assert schedule["slug"]  # by which `make up` knows it again


@deployments
def test_the_recipe_exists(deployment: dict[str, Any]) -> None:
    config_type = CONFIGS.get(deployment["entrypoint"].rpartition(".")[2])
    if config_type is not None:
        load(deployment["parameters"]["recipe"], deployment["parameters"]["overrides"], config_type)


def test_the_automation_of_the_docs_is_the_one_that_make_up_installs() -> None:
    written = yaml.safe_load((ROOT / "docs" / "automations" / "resume-crashed.yaml").read_text())
    assert AutomationCore.model_validate(written) == RESUME_CRASHED
    tags = {tag for name, one in zip(NAMES, DEPLOYMENTS, strict=True) if name.startswith(("grpo/", "sft/")) for tag in one["tags"]}
    assert {"grpo", "sft"} <= tags


def test_no_place_on_any_machine_is_named() -> None:
    PrefectYamlModel.model_validate(yaml.safe_load(TEXT))
    assert yaml.safe_load(TEXT)["pull"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]
    for word in (str(ROOT), str(Path.home()), ": /", '"/'):
        assert word not in TEXT


def test_the_working_directory_reaches_the_process() -> None:
    """`working_dir` is a variable of the process worker; elsewhere it would be ignored in silence."""
    template = json.dumps(ProcessWorker.get_default_base_job_template())
    assert "{{ working_dir }}" in template
    assert all(deployment["work_pool"]["job_variables"] == {"working_dir": "."} for deployment in DEPLOYMENTS)
