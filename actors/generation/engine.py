"""One vLLM engine: requests in, responses out, new weights in between, in a process of its own.

    EngineActor (Ray) ──► Engine ── checks requests and weights ──► executors.InProcess | executors.Async ──► vLLM

        new ──start──► ready ──shutdown──► stopped
                         └── vLLM raised ──► failed     (requests and weights that do not fit leave it ready)

vLLM is imported by `start`, so this module costs nothing to import.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch

from actors.generation.types import (
    EngineFailedError,
    EngineHealth,
    EngineState,
    GenerationRequest,
    GenerationResult,
    GenerationTimeoutError,
)
from actors.generation.weights import WeightLayout, read_layout
from configs import settings
from configs.rollout import GenerationConfig

if TYPE_CHECKING:
    from actors.generation.executors import Executor

logger = logging.getLogger(__name__)


def prepare_process(config: GenerationConfig) -> None:
    """Set what vLLM reads when it is imported or started. Its reach is this process and its children: call it in the engine's own."""
    settings.apply_defaults()
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # LLMEngine in this process; and on a CPU AsyncLLM's core without a third process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # policy workers share the cores; on two, vLLM's own binding leaves none to run on
        "VLLM_HOST_IP": "127.0.0.1",  # else its rendezvous listens on the network card
        "VLLM_LOGGING_LEVEL": settings.get("VLLM_LOGGING_LEVEL") or "WARNING",
    }
    if config.enforce_eager:
        # Helpers of vLLM's sampler are compiled even then: 35 s at the first start, 20 s at later ones, on two cores.
        values["TORCH_COMPILE_DISABLE"] = "1"
    settings.set_for_process(**values)


class Engine:
    """Call from one thread at a time; `health` from any."""

    def __init__(self, config: GenerationConfig, model_path: str, seed: int, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            model_path: Hugging Face directory with config.json and *.safetensors.
            seed: vLLM's own; each request carries the seed of its response.
            eos_token_ids: a response ends with the first of these; the token is part of it.
        """
        self._config, self._model_path, self._seed, self._eos = config, model_path, seed, tuple(eos_token_ids)
        self._state: EngineState = "new"
        self._failure = ""
        self._running = 0
        self._version = 0
        self._executor: Executor
        self._layout: WeightLayout

    @property
    def weight_version(self) -> int:
        """0 for the weights of `model_path`, else the version of the last update."""
        return self._version

    def start(self) -> str:
        """Import vLLM, load the model, make the KV cache. Returns a line for the log.

        Raises:
            FileNotFoundError: the directory is no checkpoint. GenerationTimeoutError: over `timeout_s` (executor async).
        """
        if self._state != "new":
            raise RuntimeError(f"start of an engine that is {self._state}")
        started = time.monotonic()
        self._layout = read_layout(self._model_path)
        prepare_process(self._config)
        from actors.generation import executors, sampling

        self._sampling = sampling
        arguments = executors.engine_arguments(self._config, self._model_path, self._seed)
        if self._config.executor == "in_process":
            self._executor = executors.InProcess(arguments)
        else:
            self._executor = executors.Async(arguments, self._config.timeout_s)
        self._state = "ready"
        return (
            f"vLLM ({self._config.executor}) ready in {time.monotonic() - started:.1f} s: "
            f"max_model_len {self._executor.max_model_len}, {self._config.dtype}"
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in the order of the requests. With `in_process` on a CPU the same list gives the same bits.

        Raises:
            RequestError, PromptTooLongError: nothing was generated. GenerationTimeoutError: over `timeout_s`, all aborted.
            EngineFailedError: vLLM raised, now or earlier.
        """
        self._must_be_ready()
        self._sampling.check_requests(requests, self._executor.max_model_len, self._executor.vocab_size)
        jobs = [(r.request_id, r.prompt_token_ids, self._sampling.sampling_params(r, self._eos)) for r in requests]
        self._running = len(jobs)
        try:
            outputs = self._executor.generate(jobs, self._config.timeout_s)
            return [self._sampling.result(outputs[request.request_id], self._version) for request in requests]
        except GenerationTimeoutError:
            raise
        except Exception as error:
            raise self._failed("generate", error) from error
        finally:
            self._running = 0

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        """Replace all weights, reset the prefix cache, and count as `version` from now on. No restart, no file.

        Args:
            weights: Hugging Face names to full tensors in host memory, any floating dtype; only read. A tied model may leave out
                lm_head.weight.

        Returns:
            Bytes taken over.

        Raises:
            WeightMismatchError: found before anything was loaded; the engine goes on with the weights it had.
            EngineFailedError: vLLM raised while loading, so the weights are a mixture and the engine refuses further work.
        """
        self._must_be_ready()
        checked = self._layout.checked(weights)
        try:
            self._executor.load(checked, self._config.timeout_s)
        except Exception as error:
            raise self._failed(f"update to weight version {version}", error) from error
        self._version = version
        return sum(tensor.nbytes for tensor in checked.values())

    def health(self) -> EngineHealth:
        """State, weight version and load. Notices a dead engine core."""
        if self._state == "ready" and self._executor.died():
            self._state, self._failure = "failed", "health: vLLM's engine core is dead"
        return EngineHealth(self._state, self._version, self._running, self._failure)

    def shutdown(self) -> None:
        """End vLLM and its processes. Idempotent."""
        if self._state in ("ready", "failed"):
            self._executor.shutdown()
        self._state = "stopped"

    def _must_be_ready(self) -> None:
        if self._state == "failed":
            raise EngineFailedError(self._failure)
        if self._state != "ready":
            raise RuntimeError(f"the engine is {self._state}, not ready")

    def _failed(self, doing: str, error: Exception) -> EngineFailedError:
        self._state, self._failure = "failed", f"{doing}: vLLM raised {type(error).__name__}: {error}"
        logger.error(self._failure)
        return EngineFailedError(self._failure)


class EngineActor:
    """`Engine` with methods that Ray can inspect. One call at a time, but `health` answers beside a running one."""

    def __init__(self, config: GenerationConfig, model_path: str, seed: int, eos_token_ids: Sequence[int]) -> None:
        self._engine = Engine(config, model_path, seed, eos_token_ids)

    def ready(self) -> str:
        """Start the engine. A line for the log."""
        return self._engine.start()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        return self._engine.generate(requests)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        """Pass an ObjectRef of the weights: Ray resolves it here, from the host's object store."""
        return self._engine.update_weights(weights, version)

    @ray.method(concurrency_group="health")
    def health(self) -> EngineHealth:
        return self._engine.health()

    def shutdown(self) -> None:
        self._engine.shutdown()


def engine_actor_class() -> Any:
    """`EngineActor` for Ray: `.options(name=..., namespace=..., num_cpus=..., num_gpus=...).remote(config, model_path, seed, eos_ids)`.

    On a CPU give OMP_WAIT_POLICY=passive in the options' runtime_env (OpenMP reads it before any code of ours runs): on cores that
    other actors use too, threads that spin made generation 5 to 7 times slower (two threads, two cores, load 10).
    """
    remote: Any = ray.remote  # Ray's stubs do not know concurrency_groups on classes
    return remote(concurrency_groups={"health": 1})(EngineActor)
