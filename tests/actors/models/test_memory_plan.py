"""The memory plan: against what was measured, under every layout, by its laws, and as a refusal or a warning before the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import preflight
from actors.models.hf import check_model_dir
from actors.models.memory_advice import advise
from actors.models.memory_parts import (
    CANDIDATE,
    GIB,
    WORKER_CONTEXT,
    ModelShape,
    candidate_bytes,
    captured_sizes,
    logprob_pass,
    micro_batch_tokens,
    shapes_vary,
    share_of_gpu,
    tokens_beside_graphs,
    training_pass,
    worker_stays,
)
from actors.models.memory_plan import GpuPlan, Phase, check, plan, render
from benchmarks.memory_cases import CASES, plans
from configs.base import ConfigError
from configs.loader import load
from configs.policy import PolicyConfig
from configs.run import BaseRunConfig, RunConfig
from configs.sft import SftConfig
from tests.actors.policy import tiny

QWEN2_HALF_B = ModelShape(
    layers=24, hidden=896, intermediate=4864, heads=14, query=896, key_value=128, vocab=151936, context=4096, tied=True, qk_norm=False
)
QWEN3_0_6B = ModelShape(
    layers=28, hidden=1024, intermediate=3072, heads=16, query=2048, key_value=1024, vocab=151936, context=8192, tied=True, qk_norm=True
)
SMOLLM2 = ModelShape(
    layers=30, hidden=576, intermediate=1536, heads=9, query=576, key_value=192, vocab=49152, context=8192, tied=True, qk_norm=False
)
COLOCATED = ("placement=colocated", "generation.max_num_seqs=64", "generation.max_model_len=512")
BFLOAT16 = ["policy.dtype=bfloat16", "generation.dtype=bfloat16"]


def policy(**options: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"dtype": "bfloat16"} | options)


def run(*overrides: str) -> RunConfig:
    return load("arithmetic-cpu", [*BFLOAT16, *overrides])


def only(config: BaseRunConfig, shape: ModelShape, gpus: int = 1) -> GpuPlan:
    (found,) = plan(config, shape, gpus)
    return found


@pytest.mark.parametrize(("shape", "count"), [(QWEN2_HALF_B, 494.0e6), (SMOLLM2, 134.5e6)])
def test_parameters(shape: ModelShape, count: float) -> None:
    assert shape.parameters() == pytest.approx(count, rel=2e-3)


@pytest.mark.parametrize(
    ("shape", "tokens", "length", "measured"),
    [
        (QWEN2_HALF_B, 256, 256, 9.5), (QWEN2_HALF_B, 512, 256, 9.8), (QWEN2_HALF_B, 1024, 256, 10.1), (QWEN2_HALF_B, 1024, 1024, 10.1),
        (QWEN2_HALF_B, 2048, 256, 11.4), (QWEN2_HALF_B, 4096, 4096, 14.2), (QWEN2_HALF_B, 8192, 1024, 19.5),
        (SMOLLM2, 256, 256, 2.8), (SMOLLM2, 512, 256, 2.9), (SMOLLM2, 1024, 1024, 3.2), (SMOLLM2, 2048, 256, 3.8),
        (SMOLLM2, 4096, 256, 4.9), (SMOLLM2, 4096, 4096, 4.9),
    ],
)  # fmt: skip
def test_a_worker_is_planned_as_h200s_measured_it(shape: ModelShape, tokens: int, length: int, measured: float) -> None:
    """The tables of docs/gpu.md, padded rows with graphs: what torch had reserved, without the context. Within 4 %."""
    config = policy(batching={"micro_batch_size": tokens // length, "token_buckets": [length]})
    held = sum(worker_stays(shape, config).values()) - WORKER_CONTEXT + sum(training_pass(shape, config, tokens, length).values())
    assert held / GIB == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("135m-padded", 7.33), ("135m-padded-graphs", 14.24), ("135m-packed-graphs-kl", 10.12), ("0.5b-padded", 13.94),
        ("0.5b-packed-kl", 22.23), ("0.5b-padded-graphs", 21.04), ("run-135m-awake", 20.59),
    ],
)  # fmt: skip
def test_a_gpu_is_planned_as_an_h100_measured_it(name: str, measured: float) -> None:
    """benchmarks.memory: all that was in use on the GPU, GiB. Within 5 %."""
    (one,) = plans(CASES[name])
    peak = one.peak if name.startswith("run") else one.phase("train")  # a worker alone has no refits
    assert peak.total / GIB == pytest.approx(measured, rel=0.05)


def test_a_whole_run_is_planned_as_an_h200_measured_it() -> None:
    """docs/gpu.md, benchmarks.grpo_step, 32 x 16 x 256: three engines and a worker with graphs, 33.5 GiB of the GPU. Within 10 %."""
    batching = "{mode: packed, tokens_per_micro_batch: 17408, token_buckets: [320, 17408], sequence_buckets: [64]}"
    config = run(
        "placement=colocated", "generation.num_engines=3", "generation.kv_cache_gib=4", "generation.max_num_seqs=192",
        "generation.enforce_eager=false", "generation.max_model_len=320", f"policy.batching={batching}",
        "policy.cuda_graph.impl=full_iteration",
    )  # fmt: skip
    assert only(config, SMOLLM2).peak.total / GIB == pytest.approx(33.5, rel=0.1)


def test_a_run_that_gives_memory_back_is_planned_as_an_h200_measured_it() -> None:
    """docs/gpu.md, qwen3-0.6b-1gpu: rows without buckets, so sizes vary; 29.5 GiB reserved by the worker. Within 10 %."""
    train = only(load("qwen3-0.6b-1gpu"), QWEN3_0_6B).phase("train")
    worker = sum(size for part, size in train.parts.items() if part.startswith("worker's") and not part.endswith("context"))
    assert worker / GIB == pytest.approx(29.5, rel=0.1)


def test_each_kind_of_parallelism_shares_its_own_parts() -> None:
    def parts(**parallel: int) -> dict[str, float]:
        config = policy(parallel=parallel, batching={"micro_batch_size": 8})
        return worker_stays(QWEN2_HALF_B, config) | training_pass(QWEN2_HALF_B, config, 8 * 1024, 1024)

    one, data, tensor, pipeline = parts(), parts(data=2), parts(tensor=2), parts(pipeline=2)
    assert data == one | {name: one[name] / 2 for name in ("masters", "moments")} | {"communicators": data["communicators"]}
    for name in ("weights", "gradients", "masters", "moments", "logits"):
        assert tensor[name] == one[name] / 2
    assert one["activations"] / 2 < tensor["activations"] < one["activations"], "inputs of the norms are whole on each rank"
    assert one["weights"] / 2 < pipeline["weights"] < one["weights"], "the embedding is on the first stage"
    assert pipeline["activations"] == one["activations"], "half the layers, of two micro-batches"
    assert "logits" not in pipeline, "they are on the last stage, which holds less"


def test_settings_that_need_memory() -> None:
    plain = worker_stays(SMOLLM2, policy())
    assert worker_stays(SMOLLM2, policy(dtype="float16")) == plain
    assert "reference" not in plain
    assert worker_stays(SMOLLM2, policy(loss={"kl_coef": 0.1}))["reference"] == plain["weights"]
    wide = policy(dtype="float32")
    assert worker_stays(SMOLLM2, wide)["weights"] == 2 * plain["weights"]
    assert "masters" not in worker_stays(SMOLLM2, wide)
    passes, narrow = (training_pass(SMOLLM2, config, 4096, 256) for config in (wide, policy()))
    assert passes["activations"] > 2 * narrow["activations"], "scores are kept"


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


@pytest.mark.parametrize(
    ("batching", "beside", "vary"),
    [
        ({"micro_batch_size": 4, "token_buckets": [256]}, 0, False),
        ({"micro_batch_size": 4, "token_buckets": [128, 256]}, 512, False),
        ({"mode": "packed", "tokens_per_micro_batch": 4096, "token_buckets": [256, 4096], "sequence_buckets": [64]}, 256, False),
        ({"mode": "packed", "tokens_per_micro_batch": 4096, "token_buckets": [4096], "sequence_buckets": [32, 64]}, 4096, False),
        ({"mode": "packed", "tokens_per_micro_batch": 4096}, 0, True),
    ],
)
def test_shapes_that_run_eagerly_beside_graphs(batching: dict[str, Any], beside: int, vary: bool) -> None:
    config = policy(batching=batching)
    assert tokens_beside_graphs(config, 200) == beside
    assert shapes_vary(config) == vary


def test_batch_sizes_that_vllm_captures() -> None:
    assert captured_sizes(512) == captured_sizes(256) == 51, "as vLLM says at its start"
    assert captured_sizes(2) == 3


def test_a_sleeping_engine_leaves_the_gpu_to_the_passes() -> None:
    awake, asleep = (
        only(run(*COLOCATED, "generation.kv_cache_gib=8", f"generation.sleep_level={level}"), QWEN2_HALF_B) for level in (0, 1)
    )
    for name in ("warm-up", "logprob", "train", "save"):
        given_back = awake.phase(name).total - asleep.phase(name).total
        assert given_back >= 8 * GIB + 2 * QWEN2_HALF_B.parameters()
        assert {part for part in asleep.phase(name).parts if part.startswith("engine")} == {"engine's context"}
    assert "worker's cached by passes" in awake.phase("rollout").parts
    assert "worker's cached by passes" not in asleep.phase("rollout").parts
    assert "engine's KV cache" not in asleep.phase("refit").parts, "it comes back when the weights are in"


def test_engines_that_share_a_gpu_count_each() -> None:
    one, three = (
        only(run("placement=colocated", "generation.kv_cache_gib=2", f"generation.num_engines={count}"), SMOLLM2) for count in (1, 3)
    )
    assert three.phase("rollout").parts["engines' KV cache"] == 3 * one.phase("rollout").parts["engine's KV cache"] == 6 * GIB


def test_vllm_asks_for_what_the_engine_needs_and_not_for_half_the_gpu() -> None:
    generation = run("generation.kv_cache_gib=20", "generation.max_num_seqs=64").generation
    share = share_of_gpu(QWEN2_HALF_B, generation, 80 * GIB)
    assert 20 / 80 < share < 22 / 80
    assert share_of_gpu(QWEN2_HALF_B, generation, 40 * GIB) == pytest.approx(2 * share, abs=1e-4)
    assert share_of_gpu(QWEN2_HALF_B, generation, 10 * GIB) == 1.0


def test_gpus_apart_hold_one_kind_each() -> None:
    worker, engine = plan(run("generation.kv_cache_gib=2", "generation.max_num_seqs=16"), QWEN2_HALF_B, 2)
    assert (worker.holds, engine.holds) == ("policy worker", "engine")
    assert worker.phase("refit").total >= worker.phase("rollout").total
    assert engine.phase("rollout").parts["KV cache"] == 2 * GIB
    assert engine.phase("refit").parts["received"] > 0
    (supervised,) = plan(load("sft-cpu", [], SftConfig), SMOLLM2, 1)
    assert supervised.holds == "policy worker"


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_worker_keeps_a_buffer_for_engines_on_its_gpu(gpus: int) -> None:
    def buffer(*overrides: str) -> float:
        first = plan(load("arithmetic-cpu", [*overrides]), QWEN2_HALF_B, gpus)[0]
        return first.phase("train").parts.get("worker's refit buffer", 0.0)

    assert buffer("placement=colocated", "generation.refit_buffer_mib=2048") == QWEN2_HALF_B.parameters() * 4
    assert buffer("placement=colocated") == GIB
    assert buffer("placement=colocated", "generation.refit_buffer_mib=1") == 151936 * 896 * 4, "the embedding"
    assert buffer("placement=separate") == buffer("placement=colocated", "generation.refit=host") == 0.0
    assert (buffer() > 0) == (gpus < 2), "auto: apart where there are GPUs enough"


@settings(max_examples=25, deadline=None)
@given(
    eights=st.integers(32, 2048), layers=st.integers(1, 40), kv=st.floats(0.25, 64), level=st.sampled_from([0, 1, 2]),
    graphs=st.booleans(), engines=st.integers(1, 4), kl=st.booleans(),
)  # fmt: skip
def test_laws(eights: int, layers: int, kv: float, level: int, graphs: bool, engines: int, kl: bool) -> None:
    """A phase is the sum of its parts; nothing is negative; more tokens, layers, cache, engines never need less."""

    def planned(tokens: int, layers: int, kv: float, engines: int) -> GpuPlan:
        batching = f"{{mode: packed, tokens_per_micro_batch: {tokens}, token_buckets: [{tokens}], sequence_buckets: [64, 128]}}"
        config = run(
            "placement=colocated", f"generation.sleep_level={level}", f"generation.kv_cache_gib={kv}", f"generation.num_engines={engines}",
            f"policy.batching={batching}", f"policy.cuda_graph.impl={'full_iteration' if graphs else 'none'}",
            f"policy.loss.kl_coef={0.1 if kl else 0}",
        )  # fmt: skip
        return only(config, ModelShape(**(vars(SMOLLM2) | {"layers": layers})))

    tokens = 8 * eights
    one = planned(tokens, layers, kv, engines)
    for phase in one.phases:
        assert phase.total == sum(phase.parts.values())
        assert all(size > 0 for size in phase.parts.values())
    assert one.peak.total == max(phase.total for phase in one.phases)
    for more in (
        planned(tokens + 128, layers, kv, engines), planned(tokens, layers + 1, kv, engines), planned(tokens, layers, kv + 1, engines),
        planned(tokens, layers, kv, engines + 1),
    ):  # fmt: skip
        for phase, larger in zip(one.phases, more.phases, strict=True):
            assert larger.total >= phase.total


PACKED = "policy.batching={mode: packed, tokens_per_micro_batch: 16384}"


@pytest.mark.parametrize(
    ("overrides", "shape", "gpus", "gib", "advice"),
    [
        ((*COLOCATED, "generation.kv_cache_gib=16", PACKED), SMOLLM2, 1, 24, "generation.sleep_level=1"),
        ((*COLOCATED, "generation.sleep_level=1", PACKED), SMOLLM2, 1, 14, "policy.batching.tokens_per_micro_batch=8192"),
        ((*COLOCATED, "generation.sleep_level=1", "policy.batching.micro_batch_size=64"), QWEN2_HALF_B, 1, 36, "micro_batch_size=32"),
        ((*COLOCATED, "generation.sleep_level=1", "generation.kv_cache_gib=40", "policy.batching.micro_batch_size=4"),
         QWEN2_HALF_B, 1, 40, "generation.kv_cache_gib=20"),
        ((*COLOCATED, "generation.num_engines=3", "generation.kv_cache_gib=0.4", "policy.batching.micro_batch_size=1", "mode=async",
          "policy.loss.importance_sampling=token"), SMOLLM2, 1, 10, "generation.num_engines=2"),
        ((*COLOCATED, "policy.batching.micro_batch_size=1", "mode=async", "policy.loss.importance_sampling=token"),
         QWEN2_HALF_B, 2, 13, "placement=separate"),
        (("generation.max_model_len=512", "policy.batching.micro_batch_size=1"), QWEN3_0_6B, 8, 11, "policy.parallel.tensor=2"),
        (("generation.max_model_len=512", "generation.kv_cache_gib=48", "placement=separate", "policy.batching.micro_batch_size=8"),
         QWEN3_0_6B, 2, 40, "kv_cache_gib=24"),
        ((*COLOCATED, PACKED[:-1] + ", token_buckets: [512, 16384], sequence_buckets: [64]}", "policy.cuda_graph.impl=full_iteration",
          "generation.sleep_level=2"), SMOLLM2, 1, 13.5, "tokens_per_micro_batch=8192 policy.batching.token_buckets=[512,8192]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_setting_that_would(
    overrides: tuple[str, ...], shape: ModelShape, gpus: int, gib: float, advice: str
) -> None:
    config = run(*overrides)
    with pytest.raises(ConfigError, match=r"would need .* GiB") as refused:
        check(plan(config, shape, gpus), gib * GIB, lambda: advise(config, shape, gpus, gib * GIB))
    assert advice in str(refused.value)
    fields = str(refused.value).split("it would fit with ")[1].split(" on ")[0].split()
    changed = run(*overrides, *fields)
    assert check(plan(changed, shape, gpus), gib * GIB, lambda: pytest.fail("the advice does not fit")) is not None


def test_advice_that_needs_more_gpus_says_how_many() -> None:
    config = run(*COLOCATED, "policy.batching.micro_batch_size=1", "generation.kv_cache_gib=0.25")
    said = advise(config, QWEN3_0_6B, 1, 15 * GIB)
    assert said == "it would fit with generation.sleep_level=1" or said.endswith("on 2 GPUs")
    assert "no single setting" in advise(config, QWEN3_0_6B, 1, 0.5 * GIB)


@pytest.mark.parametrize(("share", "warned"), [(0.85, False), (0.9, False), (0.95, True), (1.0, True)])
def test_a_plan_that_nearly_fills_a_gpu_warns(share: float, warned: bool) -> None:
    one = GpuPlan("engine", (Phase("rollout", {"weights": 3.0 * GIB, "KV cache": 7.0 * GIB}),))
    found = check([one], 10.0 * GIB / share, lambda: pytest.fail("it fits"))
    assert [f"{share:.0%}" in line and "rollout" in line for line in found] == [True] * warned


def test_the_plan_as_a_person_reads_it() -> None:
    phases = Phase("rollout", {"weights": 3.0 * GIB, "KV cache": 2.5 * GIB}), Phase("train", dict.fromkeys("abcdefg", 1.0 * GIB))
    shown = render([GpuPlan("engine", phases)], 10 * GIB).splitlines()
    assert shown == [
        "  engine: at most 7.0 GiB, 70% of 10.0 GiB",
        "    rollout   5.5 GiB: weights 3.00, KV cache 2.50",
        "  * train     7.0 GiB: a 1.00, b 1.00, c 1.00, d 1.00, e 1.00, others 2.00",
    ]


@pytest.mark.parametrize(
    ("gpus", "gib", "refused"), [(2, 1.0, "a GPU with"), (2, 4.0, None), (1, 3.0, "engine and policy"), (1, 9.0, None)]
)
def test_a_run_looks_at_its_gpus_before_it_starts(gpus: int, gib: float, refused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("generation.kv_cache_gib=2.0")
    shape = ModelShape.of(config.model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(preflight.memory_plan, "gpu_capacity", lambda: gib * GIB)
    if refused is None:
        preflight.check_memory(config, shape)
        return
    with pytest.raises(ConfigError, match=refused):
        preflight.check_memory(config, shape)


def test_a_policy_on_a_cpu_has_no_plan() -> None:
    assert preflight.planned_memory(load("arithmetic-cpu", ["policy.device=cpu"])) == ()
    assert [one.holds for one in preflight.planned_memory(load("arithmetic-cpu"))] == ["engine and policy worker"]


def test_a_teacher_is_in_the_plan_by_its_own_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": {"kl_coef": 1}, "parallel": {"tensor": 2}}
    teacher = tiny.write_model(tmp_path / "teacher", "llama", tied=False, hidden_size=48, num_hidden_layers=2)
    size = ModelShape.of(check_model_dir(str(teacher))).parameters(2) * 2  # bytes in bfloat16
    own, taught = (worker_stays(SMOLLM2, policy(**options, **more)) for more in ({}, {"teacher": {"path": str(teacher)}}))
    assert taught["reference"] == size < own["reference"]
    assert {name: value for name, value in taught.items() if name != "reference"} == {
        name: value for name, value in own.items() if name != "reference"
    }
    with pytest.raises(ConfigError, match=r"policy\.teacher\.path: there is no directory /nowhere"):
        worker_stays(SMOLLM2, policy(**options, teacher={"path": "/nowhere"}))
    two = {"path": str(teacher), "sources": {"a": str(teacher), "b": str(shutil.copytree(teacher, tmp_path / "other"))}}
    assert worker_stays(SMOLLM2, policy(**options, teacher=two))["reference"] == 2 * size  # a directory that comes again is one model
    with pytest.raises(ConfigError, match=r"policy\.teacher\.sources\.b: there is no directory /nowhere"):
        worker_stays(SMOLLM2, policy(**options, teacher=two | {"sources": {"b": "/nowhere"}}))


def test_a_teacher_s_candidates_are_in_the_plan_of_its_pass_and_of_training() -> None:
    exact, sampled = (policy(loss={"kl_coef": 1}, teacher={"path": "teacher", **more}) for more in ({"top_k": 64}, {}))
    for held in (lambda one: training_pass(SMOLLM2, one, 4096, 512), lambda one: logprob_pass(SMOLLM2, one, 4096)):
        assert held(exact)["teacher's candidates"] == 4096 * 64 * CANDIDATE
        assert "teacher's candidates" not in held(sampled)
    assert candidate_bytes(SMOLLM2, exact, 1000) == 1000 * 64 * (4 + 4)
