"""The memory plan: against what was measured, under every layout, and as a refusal before the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors import preflight
from actors.models.memory_plan import CONTEXT_BYTES, GIB, ModelShape, check_fits, engine_memory, micro_batch_tokens, policy_memory, render
from configs.base import ConfigError
from configs.loader import load
from configs.policy import PolicyConfig
from configs.rollout import GenerationConfig

QWEN2_HALF_B = ModelShape(
    layers=24, hidden=896, intermediate=4864, heads=14, query=896, key_value=128, vocab=151936, context=4096, tied=True, qk_norm=False
)
SMOLLM2 = ModelShape(
    layers=30, hidden=576, intermediate=1536, heads=9, query=576, key_value=192, vocab=49152, context=8192, tied=True, qk_norm=False
)


def policy(**options: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"dtype": "bfloat16"} | options)


@pytest.mark.parametrize(("shape", "count"), [(QWEN2_HALF_B, 494.0e6), (SMOLLM2, 134.5e6)])
def test_parameters(shape: ModelShape, count: float) -> None:
    assert shape.parameters() == pytest.approx(count, rel=2e-3)


@pytest.mark.parametrize(("tokens", "length", "measured"), [(512, 256, 10.0), (2048, 256, 12.1), (8192, 1024, 19.5)])
def test_the_estimate_is_near_what_an_h200_reserved(tokens: int, length: int, measured: float) -> None:
    batching = {"micro_batch_size": tokens // length, "token_buckets": [length]}
    parts = policy_memory(QWEN2_HALF_B, policy(batching=batching), length)
    assert (sum(parts.values()) - CONTEXT_BYTES) / GIB == pytest.approx(measured, rel=0.05)


def test_each_kind_of_parallelism_shares_its_own_parts() -> None:
    def parts(**parallel: int) -> dict[str, float]:
        return policy_memory(QWEN2_HALF_B, policy(parallel=parallel, batching={"micro_batch_size": 8}), 1024)

    one, data, tensor, pipeline = parts(), parts(data=2), parts(tensor=2), parts(pipeline=2)
    assert data == one | {"optimizer": one["optimizer"] / 2}
    for name in ("weights", "gradients", "optimizer", "logits"):
        assert tensor[name] == one[name] / 2
    assert one["activations"] / 2 < tensor["activations"] < one["activations"], "inputs of the norms are whole on each rank"
    assert one["weights"] / 2 < pipeline["weights"] < one["weights"], "the embedding is on the first stage"
    assert pipeline["activations"] == one["activations"], "half the layers, of two micro-batches"


def test_settings_that_need_memory() -> None:
    plain = policy_memory(SMOLLM2, policy(), 256)
    assert "reference" not in plain
    assert policy_memory(SMOLLM2, policy(loss={"kl_coef": 0.1}), 256)["reference"] == plain["weights"]
    wide = policy_memory(SMOLLM2, policy(dtype="float32"), 256)
    assert wide["weights"] == 2 * plain["weights"]
    assert wide["optimizer"] == plain["optimizer"] * 2 / 3, "no master weights"
    assert wide["activations"] > 2 * plain["activations"], "scores are kept"
    engine = engine_memory(SMOLLM2, GenerationConfig(dtype="bfloat16", kv_cache_gib=3.0))
    assert engine == {"weights": plain["weights"], "KV cache": 3 * GIB}


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        ({"micro_batch_size": 4}, (800, 200)),
        ({"micro_batch_size": 4, "token_buckets": [128, 256]}, (1024, 256)),
        ({"micro_batch_size": 4, "token_buckets": [256], "sequence_buckets": [2, 8, 16]}, (2048, 256)),
        ({"mode": "dynamic", "tokens_per_micro_batch": 4096}, (4096, 200)),
        ({"mode": "packed", "tokens_per_micro_batch": 4096}, (4096, 4096)),
    ],
)
def test_tokens_of_a_micro_batch(batching: dict[str, Any], expected: tuple[int, int]) -> None:
    assert micro_batch_tokens(policy(batching=batching), 200) == expected


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    parts = {"weights": 3.0 * GIB, "KV cache": 2.5 * GIB}
    assert render(parts) == "5.5 GiB: weights 3.00, KV cache 2.50"
    check_fits(parts, 6.0 * GIB, "engine", "")
    with pytest.raises(ConfigError, match=r"engine would need 5.5 GiB: weights 3.00, .*; the GPU has 5.0 GiB: take less"):
        check_fits(parts, 5.0 * GIB, "engine", "take less")


@pytest.mark.parametrize(("gpus", "gib", "refused"), [(2, 1.0, "policy: a worker"), (2, 3.0, None), (1, 3.0, "on one GPU"), (1, 8.0, None)])
def test_a_run_looks_at_its_gpus_before_it_starts(gpus: int, gib: float, refused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("arithmetic-cpu", ["policy.dtype=bfloat16", "generation.kv_cache_gib=2.0"])
    shape = ModelShape.of(config.model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(preflight.memory_plan, "gpu_capacity", lambda: gib * GIB)
    if refused is None:
        preflight.check_memory(config, shape)
        return
    with pytest.raises(ConfigError, match=refused):
        preflight.check_memory(config, shape)


def test_engines_that_share_a_gpu_count_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape.of(load("arithmetic-cpu").model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(preflight.memory_plan, "gpu_capacity", lambda: 8.0 * GIB)
    overrides = ["policy.dtype=bfloat16", "generation.kv_cache_gib=2.5"]
    preflight.check_memory(load("arithmetic-cpu", overrides), shape)
    with pytest.raises(ConfigError, match=r"engines' KV cache 7.50; .*generation.num_engines"):
        preflight.check_memory(load("arithmetic-cpu", [*overrides, "generation.num_engines=3"]), shape)


def test_a_policy_on_a_cpu_has_no_plan() -> None:
    assert preflight.planned_memory(load("arithmetic-cpu", ["policy.device=cpu"])) == {}
    assert set(preflight.planned_memory(load("arithmetic-cpu"))) == {"policy worker", "engine"}


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_worker_keeps_a_buffer_for_engines_on_its_gpu(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(*overrides: str) -> dict[str, float]:
        return preflight.planned_memory(load("arithmetic-cpu", ["policy.device=auto", *overrides]), QWEN2_HALF_B)["policy worker"]

    size = QWEN2_HALF_B.parameters() * 4
    assert worker("placement=colocated", "generation.refit_buffer_mib=2048")["refit"] == size
    assert worker("placement=colocated")["refit"] == GIB
    assert worker("placement=colocated", "generation.refit_buffer_mib=1")["refit"] == 151936 * 896 * 4, "the embedding"
    for elsewhere in ("placement=separate", "generation.refit=nccl"):
        assert "refit" not in worker(elsewhere)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ("refit" in worker()) == (gpus < 2), "auto: apart where there are GPUs enough"
