"""Weights go from the policy into vLLM on GPUs, and both then say the same: engines against transformers on the exported weights.

One GPU: engine and worker share it (ipc), awake and asleep in between. Two: each has its own (nccl). Three: two engines, or one over two.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult, UpdateOptions
from actors.preflight import prepare_model
from configs.loader import load
from configs.run import RunConfig
from tasks.handles import RunActors
from tasks.launch import launch, stop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NEEDS_THREE = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
PROMPTS = [[10, 20, 30], [11, 12, 13, 14, 15, 16, 17], [99], [40, 41] * 9]
LENGTH = 24
COMMON = [
    "model.hidden_size=256", "model.intermediate_size=512", "model.num_hidden_layers=3", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.max_position_embeddings=64", "policy.dtype=bfloat16", "generation.dtype=bfloat16",
    "generation.kv_cache_gib=1", "generation.max_num_seqs=64", "generation.refit_buffer_mib=1",
    "warm_start.steps=0", "warm_start.stop_at_accuracy=null", "policy.batching.micro_batch_size=8",
]  # fmt: skip
ASYNC = ["placement=separate", "generation.executor=async"]
CASES = [
    pytest.param("qwen3", ["placement=colocated", "generation.executor=async"], id="ipc-async"),
    pytest.param("llama", ["placement=colocated", "generation.executor=in_process"], id="ipc-in_process-tied-llama"),
    pytest.param(
        "llama",
        ["placement=colocated", "generation.executor=async", "generation.sleep_level=1", "generation.enforce_eager=false"],
        id="ipc-sleep-1-graphs",
    ),
    pytest.param("qwen3", ["placement=colocated", "generation.executor=in_process", "generation.sleep_level=2"], id="ipc-sleep-2"),
    pytest.param(
        "qwen3",
        ["placement=colocated", "generation.executor=async", "generation.num_engines=2", "policy.parallel.data=2"],
        id="ipc-two-gpus",
        marks=NEEDS_TWO,
    ),
    pytest.param("qwen3", ASYNC, id="nccl-async", marks=NEEDS_TWO),
    pytest.param("llama", ["placement=separate", "generation.executor=in_process"], id="nccl-in_process-tied-llama", marks=NEEDS_TWO),
    pytest.param("qwen3", [*ASYNC, "generation.num_engines=2"], id="nccl-two-engines", marks=NEEDS_THREE),
    pytest.param("qwen3", [*ASYNC, "generation.tensor_parallel_size=2"], id="nccl-tp2", marks=NEEDS_THREE),
]


class Run:
    """A run's actors, and ways to look into them."""

    def __init__(self, config: RunConfig, model: str, actors: RunActors) -> None:
        self.config, self.model, self.engines = config, model, actors.engines
        self.pool = EnginePool(actors.namespace, actors.engines, timeout_s=120)
        self._policy = ray.get_actor("policy", namespace=actors.namespace)
        ranks = range(config.policy.parallel.world_size)
        self._workers = [ray.get_actor(f"policy-worker-{rank}", namespace=actors.namespace) for rank in ranks]
        self._worker = self._workers[0]

    def disturb(self, seed: int) -> None:
        """Other weights in the policy, the same in each worker."""
        ray.get([worker.__ray_call__.remote(_disturb, seed) for worker in self._workers], timeout=60)

    def refit(self) -> dict[str, float]:
        metrics: dict[str, float] = ray.get(self._policy.refit.remote(self.engines, UpdateOptions()), timeout=120)
        return metrics

    def reference(self) -> Any:
        """transformers with the policy's present weights, in float32."""
        weights = ray.get(self._worker.call.remote("export_weights"), timeout=60)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model)).float().cuda().eval()
        missing, unexpected = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model

    def greedy(self) -> list[GenerationResult]:
        return self.pool.generate([GenerationRequest(str(row), prompt, LENGTH, 0.0, 1.0, 0) for row, prompt in enumerate(PROMPTS)])


def _disturb(actor: Any, seed: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in actor._worker._bare.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, device="cuda").to(parameter.dtype) * 0.05)


def write_llama(directory: Path, source: Path) -> str:
    """A tied Llama of the same shape, with the tokenizer of another model."""
    shape = AutoConfig.from_pretrained(source)
    torch.manual_seed(1)
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings "
        "eos_token_id pad_token_id"
    )
    LlamaForCausalLM(LlamaConfig(**{name: getattr(shape, name) for name in names.split()}, tie_word_embeddings=True)).save_pretrained(
        directory
    )
    for file in source.glob("*token*"):
        shutil.copy(file, directory)
    return str(directory)


@contextmanager
def running(config: RunConfig, model: str, namespace: str) -> Iterator[Run]:
    """The actors of a run, without Prefect."""
    actors = launch.fn(config, model, namespace)
    try:
        yield Run(config, model, actors)
    finally:
        stop(namespace, actors.address)


@pytest.fixture(scope="module")
def gpu_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="gpu-refit", _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.fixture
def run(request: pytest.FixtureRequest, gpu_ray: None, tmp_path: Path) -> Iterator[Run]:
    kind, overrides = request.param
    config = load("arithmetic-cpu", [*COMMON, *overrides])
    model = prepare_model(config, tmp_path / "model")
    if kind == "llama":
        model = write_llama(tmp_path / "llama", Path(model))
    with running(config, model, f"refit-{request.node.callspec.id}") as made:
        yield made


def check_says(reference: Any, results: list[GenerationResult]) -> None:
    """Each token is (nearly, for bfloat16) transformers' likeliest, with its log-probability."""
    errors = []
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt + result.token_ids], device="cuda")
        with torch.no_grad():
            logprobs = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (logprobs.max(-1).values - chosen).max() < 0.15
        errors.append((chosen - torch.tensor(result.logprobs, device="cuda")).abs())
    assert torch.cat(errors).mean() < 2e-2


@pytest.mark.parametrize("run", [pytest.param(case.values, id=case.id, marks=case.marks) for case in CASES], indirect=True)
def test_after_a_refit_engines_say_what_transformers_says(run: Run) -> None:
    check_says(run.reference(), run.greedy())
    for seed in (1, 2):
        if run.config.generation.sleep_level:
            run.pool.sleep()
        run.disturb(seed)
        metrics = run.refit()
        reference = run.reference()
        assert metrics["bytes"] == sum(parameter.nbytes for parameter in reference.parameters()) / 2  # they are float32 there
        check_says(reference, run.greedy())


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(("qwen3", ["placement=colocated", "generation.executor=async"]), id="memory"),
        pytest.param(
            ("qwen3", ["placement=colocated", "generation.executor=in_process", "generation.num_engines=2"]), id="memory-two-engines"
        ),
        pytest.param(("qwen3", ASYNC), id="memory-nccl", marks=NEEDS_TWO),
    ],
    indirect=True,
)
def test_refits_leave_no_memory_behind(run: Run) -> None:
    def used(count: int) -> tuple[float, float]:
        """MiB after so many refits more: of all GPUs, and of it what the policy's allocator holds."""
        for _ in range(count):
            run.refit()
        memory = [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
        policy = ray.get(run._worker.__ray_call__.remote(lambda _: torch.cuda.memory_reserved()), timeout=60)
        return sum(total - free for free, total in memory) / 2**20, policy / 2**20

    series = [used(3), *(used(5) for _ in range(4))]  # each refit in several pieces
    assert series[-1][0] <= series[0][0] + 1, series


@pytest.mark.parametrize("run", [pytest.param(("qwen3", ["placement=colocated", "generation.executor=async"]), id="lost")], indirect=True)
def test_a_policy_that_cannot_send_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.refit()
    ray.get(run._worker.__ray_call__.remote(_break_export), timeout=60)
    with pytest.raises(ray.exceptions.RayTaskError, match="no weights today"):
        run.refit()


def _break_export(actor: Any) -> None:
    def broken(send: Callable[[Any], object]) -> None:
        raise RuntimeError("no weights today")

    actor._worker.send_weights = broken
