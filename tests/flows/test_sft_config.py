"""The `sft` recipe, what its configuration refuses, and when a run ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.preflight_sft import SupervisedData, longest_allowed
from configs.base import ConfigError
from configs.loader import RECIPES, dump, load, recipe_names
from configs.sft import SftConfig
from flows.early_stopping import EarlyStopping


def sft(*overrides: str) -> SftConfig:
    return load("sft-cpu", overrides, SftConfig)


FILES = ("data.environment=null", "data.train=rows.jsonl", "data.split=0.1")


def test_the_recipe_is_short_and_reads_back(tmp_path) -> None:
    assert recipe_names(SftConfig) == ["gsm8k-sft-1gpu", "sft-cpu"]
    assert len((RECIPES / "sft-cpu.yaml").read_text().splitlines()) < 40
    for config in (sft("seed=7"), sft(*FILES, "steps=null", "epochs=2")):
        path = tmp_path / "again.yaml"
        path.write_text(dump(config))
        assert load(str(path), (), SftConfig) == config


def test_every_checkpoint_is_validated_unless_the_recipe_says_otherwise() -> None:
    assert sft().checkpoint.every_steps == 20
    assert sft("validate_every=7", "checkpoint.keep_last=5").checkpoint.every_steps == 7
    assert sft("checkpoint.every_steps=40").checkpoint.every_steps == 40
    assert sft("checkpoint.every_steps=null").checkpoint.every_steps is None
    with pytest.raises(ConfigError, match=r"^recipe 'sft-cpu': validate_every: Input should be a valid integer[^;]*$"):
        sft("validate_every=often")


def test_a_recipe_of_another_flow_names_its_flow() -> None:
    with pytest.raises(ConfigError, match=r"'sft-cpu' is for the flow 'sft', not for 'grpo': run `python -m flows\.sft`"):
        load("sft-cpu")
    with pytest.raises(ConfigError, match=r"'arithmetic-cpu' is for the flow 'grpo', not for 'sft'"):
        load("arithmetic-cpu", (), SftConfig)
    with pytest.raises(ConfigError, match="did you mean 'sft-cpu'"):
        load("sft-cpus", (), SftConfig)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.trian=x.jsonl"], ["data.trian", "did you mean 'train'"]),
        (["data.train=rows.jsonl"], ["data", "set one of `train` (a file) and `environment`"]),
        (["data.environment=null"], ["data", "set one of `train`"]),
        (["data.split=0.1"], ["data", "split", "of files only"]),
        (["data.system_prompt=Hi", "data.prompt_field=q"], ["prompt_field, system_prompt", "environment has its own"]),
        ([*FILES[:2]], ["set one of `validation` (a file) and `split`"]),
        ([*FILES, "data.validation=more.jsonl"], ["set one of `validation` (a file) and `split`"]),
        ([*FILES, "data.train=rows.csv"], ["train", "rows.csv", ".jsonl, .parquet"]),
        ([*FILES, "data.split=1"], ["data.split", "less than 1"]),
        (["epochs=2"], ["set one of `steps` and `epochs`"]),
        (["steps=null"], ["set one of `steps` and `epochs`"]),
        (["checkpoint.every_steps=30"], ["checkpoint.every_steps (30)", "multiple of validate_every (20)"]),
        (["policy.parallel.data=3"], ["batch_size (64)", "policy.parallel.data (3)"]),
        (["policy.parallel.data=2", "validation_batch_size=9"], ["validation_batch_size (9)", "policy.parallel.data (2)"]),
        (["policy.loss={kl_coef: 0.1}"], ["policy.loss", "grpo"]),
        (["policy.loss={objective: dpo}"], ["policy.loss.objective dpo and data.rejected_field belong together"]),
        (["policy.loss={objective: dpo, kl_coef: 1}"], ["policy.loss", "grpo"]),
        (["policy.loss={dpo_beta: 1}"], ["dpo_beta has no effect with objective grpo"]),
        (["data.rejected_field=worse"], ["rejected_field: of files only"]),
        (["policy.updates_per_step=2"], ["policy.updates_per_step", "one update per batch"]),
        (["patience=0"], ["patience", "greater than 0"]),
        (["rollout={max_new_tokens: 3}"], ["rollout", "no such field"]),
    ],
)
def test_bad_input_names_the_field(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        sft(*overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["policy.batching={mode: padded}"], 100),
        (["policy.batching={mode: packed, tokens_per_micro_batch: 70}"], 64),  # rows are aligned to 8
        (["policy.batching={mode: packed, tokens_per_micro_batch: 99, token_buckets: [16, 48]}"], 48),
        (["policy.batching={mode: packed, tokens_per_micro_batch: 70}", "policy.parallel.tensor=3"], 48),  # and to 8 x TP
        (["policy.batching={mode: padded}", "data.max_tokens=20"], 20),
    ],
)
def test_the_longest_sample_that_model_and_batching_hold(overrides: list[str], allowed: int) -> None:
    assert longest_allowed(sft(*overrides), context=100) == allowed


def test_a_max_tokens_beyond_the_context() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_tokens: 101 tokens are more than the model's context holds \(100\)"):
        longest_allowed(sft("data.max_tokens=101"), context=100)


@given(samples=st.integers(1, 500), batch=st.integers(1, 80), epochs=st.integers(1, 5))
def test_epochs_are_enough_steps_and_no_more(samples: int, batch: int, epochs: int) -> None:
    data = SupervisedData(train=samples, validation=1, dropped=0, longest=9, allowed=9)
    steps = data.steps(sft("steps=null", f"epochs={epochs}", f"batch_size={batch}"))
    assert steps * batch >= samples * epochs > (steps - 1) * batch
    assert data.steps(sft("steps=17")) == 17


@given(losses=st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan]), max_size=20), patience=st.integers(1, 5))
def test_early_stopping_against_its_definition(losses: list[float], patience: int) -> None:
    """Exhausted: none of the last `patience` losses is below all losses before it."""
    stopping, never = EarlyStopping(patience), EarlyStopping(None)
    for count in range(1, len(losses) + 1):
        stopping.see(losses[count - 1])
        never.see(losses[count - 1])
        lower = [loss < min((x for x in losses[:i] if x == x), default=math.inf) for i, loss in enumerate(losses[:count])]
        assert stopping.exhausted == (count >= patience and not any(lower[-patience:]))
        assert not never.exhausted
