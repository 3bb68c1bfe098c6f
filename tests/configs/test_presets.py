"""Algorithms by their names: each is a few lines, says what docs/algorithms.md says, and fits every recipe of GRPO."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from configs.base import ConfigError
from configs.loader import PRESETS, load, preset_names, recipe_names
from tests.conftest import ROOT


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_short_and_fits_every_recipe(name: str) -> None:
    text = (PRESETS / f"{name}.yaml").read_text()
    assert len(text.splitlines()) <= 6
    own = yaml.safe_load(text)["policy"]["loss"]
    for recipe in recipe_names():
        loss = load(recipe, [f"preset={name}"]).policy.loss.model_dump()
        assert {field: loss[field] for field in own} == own


def test_the_docs_have_each_with_its_settings() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|.*`(\{.*?\})`", (ROOT / "docs/algorithms.md").read_text(), flags=re.MULTILINE)
    assert {name: yaml.safe_load(block) for name, block in rows} == {
        name: yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["policy"]["loss"] for name in preset_names()
    }


def test_who_wins(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\npreset: dapo\npolicy: {loss: {clip_low: 0.1, clip_high: 0.3}}\n")
    inside = load(str(recipe))
    assert (inside.policy.loss.clip_low, inside.policy.loss.clip_high, inside.rollout.dynamic_sampling) == (0.1, 0.3, True)
    over = load(str(recipe), ["policy.loss.clip_low=0.15", "preset=dapo"])
    assert (over.policy.loss.clip_low, over.policy.loss.clip_high) == (0.15, 0.28)


@pytest.mark.parametrize("over", [False, True])
def test_a_preset_s_rewards_come_beside_the_recipe_s(tmp_path: Path, over: bool) -> None:
    def paid(rewards: str) -> list[tuple[str, float]]:
        recipe = tmp_path / "mine.yaml"
        recipe.write_text(f"name: mine\n{'' if over else 'preset: dapo'}\n{rewards}\n")
        config = load(str(recipe), ["preset=dapo"] if over else [])
        return [(reward.label, reward.weight) for reward in config.paid]

    assert paid("") == [("reasoning_gym", 1.0), ("length", 1.0)]
    assert paid("rewards: [{kind: regex, name: form, pattern: x}]") == [("form", 1.0), ("length", 1.0)]
    assert paid("rewards: [{kind: exact}, {kind: length, weight: 0.1}]") == [("exact", 1.0), ("length", 0.1)]


def test_dapo_is_all_of_it() -> None:
    config = load("arithmetic-cpu", ["preset=dapo"])
    rollout, loss = config.rollout, config.policy.loss
    assert (loss.clip_low, loss.clip_high, loss.aggregation, loss.kl_coef) == (0.2, 0.28, "token_mean", 0.0)
    assert (rollout.dynamic_sampling, rollout.most_gen_batches, rollout.overlong_filtering) == (True, 10, True)
    assert config.paid[-1].kind == "length"


def test_batches_that_nobody_would_generate() -> None:
    with pytest.raises(ConfigError, match=r"max_num_gen_batches \(3\) has no effect without dynamic_sampling"):
        load("arithmetic-cpu", ["rollout.max_num_gen_batches=3"])
    assert load("smollm2-135m-1gpu", ["rollout.dynamic_sampling=false"]).rollout.most_gen_batches == 1


def test_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset: there is no 'GSP0'; did you mean 'gspo'"):
        load("arithmetic-cpu", ["preset=GSP0"])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\npreset: [dapo]\n")
    with pytest.raises(ConfigError, match=r"there is no \['dapo'\]"):
        load(str(recipe))
