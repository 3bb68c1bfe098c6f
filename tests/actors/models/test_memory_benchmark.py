"""The parts of benchmarks.memory that need no GPU: its configurations and their plans, and what it says of measured peaks."""

from __future__ import annotations

from typing import Any

import pytest

from actors.models.memory_parts import GIB
from actors.models.memory_plan import check
from benchmarks.memory import compared, summary, table
from benchmarks.memory_cases import CASES, GROUPS, REFUSED, Refused, plans, refusals
from configs.base import ConfigError


def row(name: str, planned: float, measured: float) -> dict[str, Any]:
    return {
        "name": name, "planned": {"policy worker": {"start": 1.0, "train": planned, "refit": planned + 5}},
        "measured": {"start": {"0": 0.5}, "train": {"0": measured, "1": measured / 2}},
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_is_valid_and_would_run_on_80_gb(name: str) -> None:
    case = CASES[name]
    found = plans(case)
    assert case.group in GROUPS
    assert 2 * GIB < max(one.peak.total for one in found) < 76 * GIB
    assert case.tokens % case.length == 0


def test_there_are_configurations_of_every_kind() -> None:
    configs = [case.config() for case in CASES.values()]
    assert len(CASES) >= 12
    assert {config.generation.sleep_level for config in configs} == {0, 1, 2}
    assert {config.policy.cuda_graph.impl for config in configs} == {"none", "full_iteration"}
    assert {case.mode for case in CASES.values()} == {"padded", "packed"}
    assert {case.gpus for case in CASES.values()} == {1, 2}


def test_peaks_are_compared_over_the_phases_that_were_measured() -> None:
    found = compared(row("one", 10.0, 8.0))
    assert (found["peak_planned"], found["peak_measured"], found["ratio"]) == (10.0, 8.0, 1.25)


def test_table_and_json_line() -> None:
    rows = [compared(one) for one in (row("one", 10.0, 8.0), row("two", 9.0, 10.0), {"name": "three", "error": "exit 1: no GPU"})]
    assert table(rows)[2:] == [
        "| one | train | 10.0 | 8.0 | 1.25 |",
        "| two | train | 9.0 | 10.0 | 0.90 |",
        "| three | exit 1: no GPU | | | |",
    ]
    line = summary(rows)
    assert (line["value"], line["configurations"], line["failed"], line["errors"]) == (25.0, 2, ["three"], {"one": 25.0, "two": 10.0})
    assert summary([])["value"] is None


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: f"{one.shape} {' '.join(one.overrides)}"[:60])
def test_runs_that_no_gpu_holds_are_refused_with_a_setting_that_fits(one: Refused) -> None:
    capacity = one.gib * GIB
    with pytest.raises(ConfigError, match=r"it would fit with .*="):
        check(one.plans(), capacity, one.advice)
    setting, _, gpus = one.advice().removeprefix("it would fit with ").partition(" on ")
    assert max(found.peak.total for found in one.plans(*setting.split())) <= capacity
    assert not gpus or int(gpus.split()[0]) > one.gpus


def test_the_table_of_refusals_has_a_line_for_each() -> None:
    assert len(list(refusals())) == 2 + len(REFUSED) >= 10
