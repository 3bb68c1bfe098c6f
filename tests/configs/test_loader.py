"""A configuration that cannot run is refused with the field's name and what to do."""

import pytest
import yaml

from configs.base import ConfigError
from configs.loader import RECIPES, dump, load, recipe_names


def test_every_recipe_loads_and_is_short() -> None:
    assert "arithmetic-cpu" in recipe_names()
    for name in recipe_names():
        load(name)
    assert len((RECIPES / "arithmetic-cpu.yaml").read_text().splitlines()) < 50


def test_override_reaches_the_field_with_its_type() -> None:
    config = load("arithmetic-cpu", ["model.hidden_size=256", "rollout.temperature=0.7", "environment.task_options={min_terms: 4}"])
    assert config.model.hidden_size == 256
    assert config.rollout.temperature == 0.7
    assert config.environment.task_options == {"min_terms": 4}


def test_dump_reads_back_equal(tmp_path) -> None:
    config = load("arithmetic-cpu", ["seed=7", "policy.optimizer.lr=5e-4"])
    path = tmp_path / "again.yaml"
    path.write_text(dump(config))
    assert load(str(path)) == config


def test_dump_of_a_model_path_reads_back(tmp_path) -> None:
    source = yaml.safe_load((RECIPES / "arithmetic-cpu.yaml").read_text()) | {"model": {"path": "models/mine"}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(source))
    config = load(str(path))
    path.write_text(dump(config))
    assert load(str(path)) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_sise=3", ["model.hidden_sise", "did you mean 'hidden_size'"]),
        ("stepz=3", ["stepz", "did you mean 'steps'"]),
        ("environment.sources=[{name: a, pth: b}]", ["environment.sources.0.pth", "did you mean 'path'"]),
        ("validation.sets={a: {pth: b}}", ["validation.sets.a.pth", "did you mean 'path'"]),
        ("rewards=[{kind: math, wait: 1}]", ["rewards.0.math.wait", "did you mean 'weight'"]),
        ("policy.optimizer.learning_rate=3", ["policy.optimizer.learning_rate", "valid fields here", "lr"]),
        ("rollout.responses_per_prompt=1", ["rollout.responses_per_prompt", "group of 1", "2 or more"]),
        ("policy.parallel.data=3", ["512", "3", "do not divide", "policy.parallel.data"]),
        ("policy.updates_per_step=7", ["512", "7", "policy.updates_per_step"]),
        ("model.path=somewhere", ["path is set", "remove", "hidden_size"]),
        ("model.hidden_size=130", ["130", "num_attention_heads"]),
        ("model.num_key_value_heads=3", ["num_attention_heads", "num_key_value_heads"]),
        ("policy.optimizer.min_lr=1", ["policy.optimizer", "min_lr", "above lr"]),
        ("policy.optimizer.decay_steps=30", ["decay_steps (30)", "warmup_steps (40)"]),
        ("policy.optimizer={decay_steps: 9}", ["policy.optimizer", "decay_style is 'constant'"]),
        ("steps=0", ["steps", "greater than 0"]),
        ("name=a/b", ["name"]),
        ("environment.kind=dataset", ["environment", "path"]),
        ("environment.kind=jsonl", ["environment.kind", "dataset"]),
        ("environment={kind: python, import_path: nocolon}", ["import_path", "package.module:Class"]),
        ("seed.deep=3", ["seed", "is a value"]),
        ("nonsense", ["field=value"]),
    ],
)
def test_bad_input_names_the_field(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("arithmetic-cpu", [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.loss.importance_sampling=none", ["importance_sampling is none", "token or sequence"]),
        ("data_plane.capacity_samples=1023", ["capacity_samples (1023)", "128 groups x 8", "1024"]),
        ("asynchronous.buffer_capacity=63", ["buffer_capacity (63 groups)", "prompts_per_step (64)"]),
        ("asynchronous={max_trajectory_age_steps: 2, in_flight_weight_updates: false}", ["max_trajectory_age_steps = 2", "in_flight"]),
        ("policy.loss.objective=grop", ["policy.loss.objective", "did you mean 'grpo'"]),
        ("policy.loss.advantages=group_relativ", ["policy.loss.advantages", "did you mean 'group_relative'"]),
        ("asynchronous.sampler=windowd", ["asynchronous.sampler", "did you mean 'windowed'"]),
    ],
)
def test_async_settings_that_do_not_fit_are_refused(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("arithmetic-cpu-async", [override])
    for word in words:
        assert word in str(caught.value)


def test_a_warm_start_batch_that_does_not_divide() -> None:
    load("arithmetic-cpu", ["warm_start.batch_size=65"])  # one worker: any batch divides
    with pytest.raises(ConfigError, match=r"warm_start\.batch_size \(65\) does not divide by policy\.parallel\.data \(2\)"):
        load("arithmetic-cpu", ["warm_start.batch_size=65", "policy.parallel.data=2"])


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'arithmetic-cpu'"):
        load("arithmetik-cpu")
    with pytest.raises(ConfigError, match=r"path that ends in \.yaml"):
        load("zzz")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "42"])
def test_a_file_that_is_no_recipe(tmp_path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load(str(path))
