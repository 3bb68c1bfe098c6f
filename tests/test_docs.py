"""The examples of docs/architecture.md: each block is a file, and does what the text says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import save_file

from actors.environments import registry as environments
from actors.environments.base import Problem
from actors.policy.objectives import advantages
from actors.policy.objectives import registry as objectives
from actors.refit.manifest import WeightLayout, WeightMismatchError
from actors.refit.transport import RefitPlan
from configs.environment import EnvironmentConfig
from configs.policy import PolicyConfig
from tests.actors.policy.objectives.batches import loss_of, micro_batch
from tests.conftest import ROOT

BLOCK = re.compile(r"```python\n# (\w+)\.py\n(.*?)```", re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports an example by its file's name."""
    blocks = dict(BLOCK.findall((ROOT / "docs" / "architecture.md").read_text()))
    monkeypatch.syspath_prepend(tmp_path)

    def load(name: str) -> Any:
        (tmp_path / f"{name}.py").write_text(blocks[name])
        return importlib.import_module(name)

    yield load
    for name in blocks:
        sys.modules.pop(name, None)


def test_an_objective(example: Callable[[str], Any]) -> None:
    example("my_objective")
    objective = objectives.build("my_objective:Imitation", PolicyConfig())
    mask = torch.tensor([[False, True, True], [False, True, False]])
    gains = torch.tensor([[1.5], [-1.0]]).expand(2, 3)
    logprobs = torch.tensor([[0.0, -0.5, -1.0], [0.0, -2.0, 0.0]], requires_grad=True)
    loss, _ = loss_of(objective, micro_batch(mask, torch.ones(2), {"advantages": gains}, tokens=3, sequences=2), logprobs)
    assert loss.item() == pytest.approx(1.5 * (0.5 + 1.0) / 3)  # the worse response weighs nothing
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[1].abs().sum() == 0


def test_an_advantage(example: Callable[[str], Any]) -> None:
    example("my_advantage")
    function = advantages.find("my_advantage:over_the_best_other")
    assert function([1.0, 0.0, 0.25], normalize=True) == [0.75, -1.0, -0.75]
    assert function([1.0], normalize=True) == [0.0]


def test_an_environment(example: Callable[[str], Any]) -> None:
    example("my_environment")
    config = EnvironmentConfig(kind="python", import_path="my_environment:Doubles")
    environment = environments.build(config, seed=0)
    problem = environment.problem("validation", 7)
    assert problem == Problem("doubles-1007", "Double 1007.", "2014")
    scored = environments.imported_here(config)  # as in a scoring process
    assert [scored.score(problem, said) for said in (" 2014\n", "2041")] == [1.0, 0.0]


class Worker:
    """Rank 0 of a policy with one weight."""

    def call(self, method: str, folder: str) -> None:
        assert method == "save_hf"
        save_file({"model.norm.weight": torch.arange(4.0)}, f"{folder}/model.safetensors")


def test_a_transport(example: Callable[[str], Any], ray_session: None, tmp_path: Path) -> None:
    transport = example("my_transport").Directory(timeout_s=60.0)
    transport.folder = str(tmp_path)
    remote: Any = ray.remote
    worker = remote(num_cpus=0)(Worker).remote()
    try:
        offered, sending = transport.offer(RefitPlan(), {"policy-worker-0": worker}, "unused", [])
    finally:
        ray.kill(worker)
    assert sending == {}
    with transport.receive(offered, WeightLayout({"model.norm.weight": (4,)}, tied=False), in_process=True) as (infos, size):
        (info,) = infos
        assert (info["weights"]["model.norm.weight"].tolist(), size) == ([0.0, 1.0, 2.0, 3.0], 16)
    with (
        pytest.raises(WeightMismatchError, match="has shape"),
        transport.receive(offered, WeightLayout({"model.norm.weight": (5,)}, tied=False), in_process=True),
    ):
        pass


def test_a_stage(example: Callable[[str], Any], ray_session: None) -> None:
    stage = example("my_stage")
    ray.cloudpickle.register_pickle_by_value(stage)  # its file is on this process's path alone
    remote: Any = ray.remote
    auditor = remote(stage.Auditor).options(name="auditor", namespace="docs", num_cpus=0).remote()
    try:
        assert stage.audit.fn("docs", 1, ["a", "b", "a"], 60.0) == {"audit/groups": 2.0}
    finally:
        ray.kill(auditor)


def test_every_example_is_run() -> None:
    names = {name for name, _ in BLOCK.findall((ROOT / "docs" / "architecture.md").read_text())}
    assert names == {"my_objective", "my_advantage", "my_environment", "my_transport", "my_stage"}
    assert (ROOT / "docs" / "architecture.md").read_text().count("```python") == len(names)
