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
    "overrides",
    [["preset=reinforce-pp"], ["preset=on-policy-distillation", "policy.teacher.path=runs/teacher/hf"]],
)
def test_one_response_to_a_prompt_is_enough_where_no_group_is_compared(overrides) -> None:
    assert load("arithmetic-cpu", ["rollout.responses_per_prompt=1", *overrides]).rollout.responses_per_prompt == 1
    with pytest.raises(ConfigError, match="dynamic_sampling leaves all such out"):
        load("arithmetic-cpu", ["rollout.responses_per_prompt=1", "rollout.dynamic_sampling=true", *overrides])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_sise=3", ["model.hidden_sise", "did you mean 'hidden_size'"]),
        ("stepz=3", ["stepz", "did you mean 'steps'"]),
        ("environment.sources=[{name: a, pth: b}]", ["environment.sources.0.pth", "did you mean 'path'"]),
        ("validation.sets={a: {pth: b}}", ["validation.sets.a.pth", "did you mean 'path'"]),
        ("rewards=[{kind: math, wait: 1}]", ["rewards.0.math.wait", "did you mean 'weight'"]),
        ("policy.optimizer.learning_rate=3", ["policy.optimizer.learning_rate", "did you mean 'policy.optimizer.lr'? (TRL)"]),
        ("policy.optimizer.xyz=3", ["policy.optimizer.xyz", "valid fields here", "lr"]),
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


RECIPE = (RECIPES / "arithmetic-cpu.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RECIPE + "\npolicy: {updates_per_step: 1}\n", ["mine.yaml, line ", "'policy' is given twice, in lines "]),
        ("model: {hidden_size: 8,\n  hidden_size: 9}\n", ["line 2", "'hidden_size' is given twice, in lines 1 and 2"]),
        (RECIPE + "\nflow: GRPO\n", ["flow", f"(line {RECIPE.count(chr(10)) + 2})", "no flow 'GRPO'; did you mean 'grpo'?"]),
        ("name: a\nstepz: 3\n", ["mine.yaml", "stepz: no such field; did you mean 'steps'? (line 2)"]),
        ("name: a\nsteps: true\n", ["steps", "(got 'true') (line 2)"]),
        ("name: a\npolicy:\n  optimizer:\n    lr: yes\n", ["policy.optimizer.lr", "(got 'true') (line 4)"]),
        ("name: a\nrewards:\n- kind: math\n- kind: exact\n  wait: 1\n", ["rewards.1.exact.wait", "did you mean 'weight'? (line 5)"]),
        (
            "name: a\nsteps: 3\nrollout:\n  responses_per_prompt: 3\n  prompts_per_step: 5\npolicy:\n  updates_per_step: 2\n",
            ["(whole configuration)", "= 15 samples do not divide", "(lines 4, 5 and 7)"],
        ),
        ("name: a\npolicy:\n  optimizer:\n    lr: 1.0e-5\n    min_lr: 1.0e-4\n", ["policy.optimizer: min_lr", "(lines 4 and 5)"]),
        ("name: a\nmode: async\n", ["(whole configuration): mode async", "(line 2)"]),
        ("name: latest\n", ["name: 'latest' is the link to the newest run", "(line 1)"]),
        ("name: a\nPolicy: {}\n", ["Policy: no such field; did you mean 'policy'? (line 2)"]),
        ("", ["mine.yaml", "this file is empty"]),
    ],
)
def test_a_wrong_recipe_names_the_line(tmp_path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    for word in words:
        assert word in str(caught.value)


def test_a_recipe_that_is_not_utf_8(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes("name: a\n# café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 2: not UTF-8 text \(byte 0xe9\): save the file as UTF-8"):
        load(str(path))


def test_a_file_that_is_missing(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*missing\.yaml; give the path of a recipe, or a name: arithmetic-cpu"):
        load(str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match=r"there is no file arithmetic-cpu\.yaml; did you mean 'arithmetic-cpu'"):
        load("arithmetic-cpu.yaml")


@pytest.mark.parametrize("overrides", [[], ["policy.updates_per_step=2"], ["environment.curriculum={}"]])
def test_an_empty_block_counts_as_left_out(tmp_path, overrides: list[str]) -> None:
    path, without = tmp_path / "mine.yaml", tmp_path / "without.yaml"
    path.write_text("name: a\npolicy:\nenvironment:\n  task_options:\n  curriculum:\n")
    without.write_text("name: a\n")
    assert load(str(path), overrides) == load(str(without), overrides)


@pytest.mark.parametrize("override", ["steps=true", "seed=off", "policy.optimizer.lr=yes", "rollout.temperature=on"])
def test_true_is_no_number(override: str) -> None:
    with pytest.raises(ConfigError, match=r"valid (integer|number)"):
        load("arithmetic-cpu", [override])


def test_a_merge_key_may_be_overridden(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: a\nmodel: {<<: {hidden_size: 64, intermediate_size: 64}, hidden_size: 256}\n")
    shape = load(str(path)).model
    assert (shape.hidden_size, shape.intermediate_size) == (256, 64)
