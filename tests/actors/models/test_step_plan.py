"""The planned seconds of a step against steps that were measured (docs/gpu.md, "Benchmarks of whole runs")."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.models.hf import check_model_dir
from actors.models.memory_parts import ModelShape
from actors.models.step_plan import Device, StepPlan, cpu_device, gpu_device, plan_grpo, plan_sft
from actors.preflight import prepare_model
from configs.loader import load
from configs.model import ModelConfig
from configs.run import RunConfig
from configs.sft import SftConfig

SMOLLM2 = """{"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": true}"""


@pytest.fixture
def smollm2(tmp_path: Path) -> tuple[str, ModelShape]:
    (tmp_path / "config.json").write_text(SMOLLM2)
    return str(tmp_path), ModelShape(
        layers=30, hidden=576, intermediate=1536, heads=9, query=576, key_value=192, vocab=49152, context=8192, tied=True, qk_norm=False
    )


def device(name: str = "NVIDIA H200") -> Device:
    found = gpu_device(name)
    assert found is not None
    return found


def planned(smollm2: tuple[str, ModelShape], *overrides: str) -> StepPlan:
    config = load("smollm2-135m-1gpu", ["rollout.dynamic_sampling=false", *overrides])
    return plan_grpo(config, *smollm2, 20, device())


@pytest.mark.parametrize(
    ("prompts", "tokens", "engines", "measured"),
    [(32, 256, 3, 2.43), (16, 1024, 3, 6.68), (32, 256, 1, 5.01), (32, 256, 2, 2.94), (16, 1024, 1, 11.08)],
)
def test_within_a_factor_of_what_was_measured(
    smollm2: tuple[str, ModelShape], prompts: int, tokens: int, engines: int, measured: float
) -> None:
    step = planned(
        smollm2, f"rollout.prompts_per_step={prompts}", f"rollout.max_new_tokens={tokens}", f"generation.num_engines={engines}",
        "generation.max_model_len=2048",
    )  # fmt: skip
    assert measured / 1.5 < step.seconds < 1.5 * measured


def test_what_makes_a_step_longer(smollm2: tuple[str, ModelShape]) -> None:
    usual = planned(smollm2)
    assert planned(smollm2, "rollout.max_new_tokens=64").generating == pytest.approx(2 * usual.generating)
    assert planned(smollm2, "generation.max_num_seqs=64").generating > usual.generating  # they wait for each other
    assert planned(smollm2, "policy.loss.kl_coef=0").passes < usual.passes  # no reference
    two = planned(smollm2, "policy.parallel.data=2", "generation.num_engines=2")
    assert two.passes == pytest.approx(usual.passes / 2)
    beside = planned(smollm2, "mode=async", "policy.loss.importance_sampling=token")
    assert beside.seconds - beside.other == max(beside.generating, beside.passes + beside.refit)


def test_a_gpu_that_nobody_has_looked_up() -> None:
    assert gpu_device("NVIDIA GeForce GTX 1080") is None


def test_on_a_cpu(tmp_path: Path) -> None:
    config: RunConfig = load("arithmetic-cpu")
    path = prepare_model(config, tmp_path / "model")
    step = plan_grpo(config, path, ModelShape.of(check_model_dir(path)), 13.0, cpu_device())
    assert min(step.generating, step.passes, step.refit, step.other) > 0
    assert isinstance(config.model, ModelConfig)
    sft = load("sft-cpu", (), SftConfig)
    assert plan_sft(sft, path, 20, cpu_device()).generating == 0
