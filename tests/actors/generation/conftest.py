"""One Ray, and one engine at a time, for the whole session; tiny random models written by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from actors.generation.engine import engine_actor_class
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult, UpdateMode, UpdateOptions, WeightUpdate
from configs.rollout import GenerationConfig
from tests.patience import WAIT_S

NAMESPACE = "test-generation"
EOS = tuple(range(1, 9))  # eight of 128 ids, so that random models do end responses
CONTEXT = 48
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def build_model(family: str, tied: bool, seed: int) -> PreTrainedModel:
    """A random model in float32."""
    torch.manual_seed(seed)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).float().eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).float().eval()


def request(name: str, prompt: list[int], **changes: Any) -> GenerationRequest:
    """Greedy and short unless told otherwise."""
    values = {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0} | changes
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, **values)


@dataclass
class RunningEngine:
    """A started engine, and how to make models that fit it."""

    name: str
    handle: Any
    executor: str
    model: Callable[[int], PreTrainedModel]  # seed -> model; the engine was started from seed 0
    tied: bool
    initial: list[GenerationResult]  # greedy answers to `PROMPTS`, before any refit

    def generate(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        return EnginePool(NAMESPACE, [self.name], timeout_s=WAIT_S).generate(requests)

    def refit(self, seed: int, version: int) -> PreTrainedModel:
        model = self.model(seed)
        ray.get(self.handle.update_weights.remote(ray.put(weights_of(model)), version, UpdateOptions()), timeout=WAIT_S)
        return model


def update(pool: EnginePool, weights: Any, version: int, mode: UpdateMode = "wait", *, recompute: bool = True) -> dict[str, WeightUpdate]:
    """Weights from the object store into all engines of the pool."""
    return pool.end_update(pool.begin_update(weights, version, UpdateOptions(mode, recompute)), version)


PROMPTS = [[10, 20, 30], [11, 12, 13, 14, 15, 16, 17], [99], [40, 41] * 9]


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a policy exports: Hugging Face names, a tied lm_head left out."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


KINDS = [
    pytest.param(("qwen3", True, "in_process"), id="qwen3-tied-in_process"),
    pytest.param(("llama", True, "in_process"), id="llama-tied-in_process", marks=pytest.mark.slow),
    pytest.param(("qwen3", False, "async"), id="qwen3-untied-async", marks=pytest.mark.slow),
]


@pytest.fixture(scope="session", params=KINDS)
def engine(request: pytest.FixtureRequest, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    family, tied, executor = request.param
    path = tmp_path_factory.mktemp("model")
    build_model(family, tied, 0).save_pretrained(path)
    config = GenerationConfig(executor=executor, kv_cache_gib=0.125, max_num_seqs=32)
    name = f"engine-{family}-{executor}"
    handle = engine_actor_class().options(name=name, namespace=NAMESPACE, num_cpus=1).remote(config, str(path), 0, EOS)
    print(ray.get(handle.ready.remote(), timeout=WAIT_S))
    running = RunningEngine(name, handle, executor, lambda seed: build_model(family, tied, seed), tied, [])
    running.initial = running.generate([_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
    yield running
    ray.get(handle.shutdown.remote(), timeout=WAIT_S)
    ray.kill(handle)


_request = request  # the fixture's own argument hides it
