"""What vLLM's workers and engines are told: the sampler's warm-up, and what is compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from vllm.config import CompilationConfig
from vllm.config.compilation import CompilationMode
from vllm.sampling_params import SamplingParams

from actors.generation import vllm_workers
from actors.generation.sampling import sampling_params
from actors.generation.vllm_executors import engine_arguments
from configs.base import ConfigError
from configs.rollout import GenerationConfig
from tests.actors.generation.conftest import EOS, request

# What says when a request ends, and what its caller gets: no work of the sampler's.
NOT_THE_SAMPLERS = {"seed", "max_tokens", "stop_token_ids", "flat_logprobs", "detokenize", "output_kind"}


def test_the_sampler_is_warmed_up_with_what_requests_ask() -> None:
    assert vllm_workers.WorkerExtension
    warm, asked = SamplingParams.for_sampler_warmup(), sampling_params(request("0", [5, 6, 7], temperature=1.0), EOS)
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - NOT_THE_SAMPLERS
    assert {name: getattr(warm, name) for name in names} == {name: getattr(asked, name) for name in names}
    assert warm.seed is not None


def test_vllm_warms_up_by_the_method_that_is_replaced() -> None:
    found = importlib.util.find_spec("vllm.v1.worker.gpu")
    assert found is not None
    assert found.submodule_search_locations is not None
    assert "= SamplingParams.for_sampler_warmup()" in (Path(found.submodule_search_locations[0]) / "warmup.py").read_text()


def test_what_is_compiled_is_the_user_s_or_vllm_s_choice() -> None:
    asked = GenerationConfig(enforce_eager=False, compilation_config={"mode": 0, "cudagraph_mode": "FULL"})
    found = engine_arguments(asked, "nowhere", 0, "host")["compilation_config"]
    assert (found.mode, found.cudagraph_mode.name) == (CompilationMode.NONE, "FULL")
    assert engine_arguments(GenerationConfig(), "nowhere", 0, "host")["compilation_config"] == CompilationConfig()


def test_what_vllm_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match=r"generation\.compilation_config\.mod: Unexpected keyword argument"):
        engine_arguments(GenerationConfig(compilation_config={"mod": 0}), "nowhere", 0, "host")
