"""Other projects' names for settings: each answer names a field that exists, and a recipe that has their names is answered by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.base import ConfigError, has_field
from configs.loader import load
from configs.other_names import PROJECTS
from configs.run import RunConfig
from configs.sft import SftConfig

ENTRIES = [(project, name) for project, table in PROJECTS.items() for name in table]


@pytest.mark.parametrize(("project", "name"), ENTRIES)
def test_an_entry(project: str, name: str) -> None:
    ours = PROJECTS[project][name]
    assert ours.fields or ours.note
    for field in ours.fields:
        assert has_field(RunConfig, field.split(".")) or has_field(SftConfig, field.split(".")), field
    if has_field(RunConfig, name.split(".")):
        assert name in ours.fields  # nobody is told to write something else
        return
    with pytest.raises(ConfigError) as caught:
        load("arithmetic-cpu", [f"{name}=1"])
    fields = [field for field in ours.fields if has_field(RunConfig, field.split("."))]
    wanted = f"did you mean {fields[0]!r}?" if fields else f"none is needed ({project})" if not ours.fields else "no such field"
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("num_generations=8", "num_generations: no such field; did you mean 'rollout.responses_per_prompt'? (TRL)"),
        ("rollout.num_generations=8", "rollout.num_generations: no such field; did you mean 'rollout.responses_per_prompt'? (TRL)"),
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n: no such field; did you mean 'rollout.responses_per_prompt'? (verl)",
        ),
        ("rollout.n=8", "rollout.n: no such field; did you mean 'rollout.responses_per_prompt'? (verl)"),
        ("policy.model_name=a", "policy.model_name: no such field; did you mean 'model.path'? (NeMo-RL)"),
        ("policy.generation.temperature=1", "did you mean 'rollout.temperature'? (NeMo-RL)"),
        ("use_vllm=true", "use_vllm: no such field, and none is needed (TRL): vLLM always generates"),
        ("stepz=3", "did you mean 'steps'?"),
    ],
)
def test_an_override(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("arithmetic-cpu", [override])
    assert words in str(caught.value)


def test_the_flow_says_which_of_our_fields_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'data\.train'"):
        load("sft-cpu", ["data.train_files=a.parquet"], SftConfig)
    with pytest.raises(ConfigError, match=r"did you mean 'environment\.path'"):
        load("arithmetic-cpu", ["data.train_files=a.parquet"])
    with pytest.raises(ConfigError, match="num_generations: no such field; valid fields here"):
        load("sft-cpu", ["num_generations=8"], SftConfig)


def test_a_configuration_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("""name: theirs
actor_rollout_ref:
  rollout:
    n: 8
    ignore_eos: false
  actor:
    optim: {lr: 1.0e-6}
trainer:
  total_training_steps: 100
""")
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    for words in (
        "actor_rollout_ref.rollout.n: no such field; did you mean 'rollout.responses_per_prompt'? (verl) (line 4)",
        "actor_rollout_ref.actor.optim.lr: no such field; did you mean 'policy.optimizer.lr'? (verl) (line 7)",
        "actor_rollout_ref: no such block; 1 more fields in it: docs/coming-from.md (line 2)",
        "trainer.total_training_steps: no such field; did you mean 'steps'? (verl) (line 9)",
    ):
        assert words in str(caught.value)
