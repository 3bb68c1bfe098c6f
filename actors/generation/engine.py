"""One vLLM engine: requests in, responses out, new weights in between, in a process of its own.

    submit, abort ──► Engine ── checks requests and weights ──► InProcess | Async ──► vLLM
                       │ ▲                                           │
    collect ◄────── Mailboxes ◄───────── results by client ◄─────────┘

    new ──ready──► ready ──shutdown──► stopped
                     └── vLLM raised ──► failed     (requests and weights that do not fit leave it ready)

An actor that Ray starts again (max_restarts) calls `ready` itself, and is stale, which refuses requests, until it has the run's weights.

vLLM is imported by `ready`, so this module costs nothing to import.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors import node
from actors.files import Files, at_this_node
from actors.generation.mailboxes import Mailboxes
from actors.generation.types import (
    EngineFailedError,
    EngineHealth,
    EngineNotReadyError,
    EngineState,
    GenerationRequest,
    GenerationResult,
    GenerationTimeoutError,
    RequestError,
    UpdateOptions,
    WeightUpdate,
)
from actors.generation.versions import Segments
from actors.heap import freeze_heap
from actors.refit.host import Host
from actors.refit.manifest import WeightLayout, read_layout
from actors.refit.transport import UpdateInfo
from actors.refit.transports import TRANSPORTS
from configs import settings
from configs.rollout import GenerationConfig

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from actors.generation.vllm_executors import Executor

logger = logging.getLogger(__name__)

COLLECTORS = 16  # threads of an engine actor in which clients wait for results; a further one queues until another's wait ends


def prepare_process(config: GenerationConfig) -> None:
    """Set what vLLM reads when it is imported or started. Its reach is this process and its children: call it in the engine's own."""
    settings.apply_defaults()
    node.bind_collectives()
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # LLMEngine in this process; and on a CPU AsyncLLM's core without a third process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # policy workers share the cores; on two, vLLM's own binding leaves none to run on
        "VLLM_HOST_IP": "127.0.0.1",  # its workers are processes of this machine
        "VLLM_RPC_BASE_PATH": str(_sockets()),
        "VLLM_LOGGING_LEVEL": settings.get("VLLM_LOGGING_LEVEL") or "WARNING",
    }
    if config.refit == "ipc":
        # Handles of GPU memory hold torch's own types, which AsyncLLM else refuses to send to its core: both are processes of this actor.
        values["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if config.enforce_eager:
        # Helpers of vLLM's sampler are compiled even then: 35 s at the first start, 20 s at later ones, on two cores.
        values["TORCH_COMPILE_DISABLE"] = "1"
        if "torch" in sys.modules:  # has read it already: a fork (actors/forks)
            sys.modules["torch"].compiler.set_stance("force_eager")
    settings.set_for_process(**values)


def _sockets() -> Path:
    """The folder of vLLM's unix sockets: its core unpickles what comes through them."""
    folder = node.private_folder("vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Engine:
    """Call from any thread. Requests belong to a client, which alone sees their results; ids of two clients may be equal.

    As an actor it takes at the same time `submit` and `abort` (in order), up to `COLLECTORS` waiting `collect`, one update, and `health`.
    """

    def __init__(self, config: GenerationConfig, model: str | Files, seed: int, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            model: Hugging Face directory with config.json and *.safetensors.
            seed: vLLM's own; each request carries the seed of its response.
            eos_token_ids: a response ends with the first of these; the token is part of it.
        """
        self._config, self._model, self._seed, self._eos = config, model, seed, tuple(eos_token_ids)
        self._state: EngineState = "new"
        self._failure = ""
        self._lock = threading.Lock()  # of the state, `_open` and `_owners`
        self._open: dict[tuple[str, str], str] = {}  # client and request id to key in vLLM; who takes an entry out ends the request
        self._owners: dict[str, tuple[str, str]] = {}  # and back
        self._mailboxes = Mailboxes()
        self._updating = threading.Lock()
        self._transport = TRANSPORTS.get(config.refit, Host)(config.timeout_s)  # "auto", where no placement has decided: host
        self._numbers = itertools.count()  # a key is never used again: an aborted request may still end under its own
        self._executor: Executor
        self._layout: WeightLayout
        self._incarnation = uuid.uuid4().hex
        self._has_weights = True  # in host memory, while it sleeps
        self._stale = _started_again()
        if self._stale:  # not here: a constructor that raises would end the actor for good, and one that is slow hides its health
            threading.Thread(target=self._start_again, name="start-again", daemon=True).start()

    def ready(self) -> str:
        """Start: import vLLM, load the model, make the KV cache. Returns a line for the log.

        Raises:
            FileNotFoundError, ConfigError: the directory is no checkpoint. TimeoutError: over `timeout_s` (executor async).
        """
        if self._state != "new":
            raise RuntimeError(f"ready: the engine is {self._state}, not new")
        started = time.monotonic()
        model_path = at_this_node(self._model)
        self._layout = read_layout(model_path)
        prepare_process(self._config)
        from actors.generation import in_process, sampling, streaming, vllm_executors

        self._sampling, self._job = sampling, vllm_executors.Job
        vllm_executors.look_at_class(model_path)
        arguments = vllm_executors.engine_arguments(self._config, model_path, self._seed, self._transport.backend)
        if self._config.executor == "in_process":
            self._executor = in_process.InProcess(arguments, self)
        else:
            self._executor = streaming.Async(arguments, self, self._config.timeout_s)
        self._state = "ready"
        freeze_heap()
        return (
            f"vLLM ({self._config.executor}) ready in {time.monotonic() - started:.1f} s: "
            f"max_model_len {self._executor.max_model_len}, {self._config.dtype}"
        )

    @ray.method(concurrency_group="submit")
    def submit(self, client: str, requests: Sequence[GenerationRequest]) -> str:
        """Let the requests join those that run. All or none; does not wait. Returns the engine's incarnation.

        Raises:
            RequestError, PromptTooLongError: also if the client has a running request of that id. EngineFailedError.
            EngineNotReadyError: also when it is stale.
        """
        self._must_be_ready()
        if self._stale:
            raise EngineNotReadyError("the engine was started again, and waits for the run's weights")
        if self._executor.asleep:
            self._wake_up()
        self._sampling.check_requests(requests, self._executor.max_model_len, self._executor.vocab_size)
        jobs = [
            self._job(f"{client}/{r.request_id}/{next(self._numbers)}", r.prompt_token_ids, self._sampling.sampling_params(r, self._eos))
            for r in requests
        ]
        with self._lock:
            self._must_be_ready()
            if running := next((r.request_id for r in requests if (client, r.request_id) in self._open), None):
                raise RequestError(f"request {running!r} of client {client!r} is running already")
            for request, job in zip(requests, jobs, strict=True):
                owner = client, request.request_id
                self._open[owner], self._owners[job.key] = job.key, owner
        self._executor.start(jobs)
        return self._incarnation

    @ray.method(concurrency_group="collect")
    def collect(self, client: str, timeout_s: float, incarnation: str = "") -> list[GenerationResult]:
        """The client's finished results, in the order in which they finished; each is handed out once.

        Args:
            incarnation: that the requests were submitted to; empty: whichever.

        Returns:
            As soon as there is one, all that are there; none at the deadline.

        Raises:
            EngineFailedError: vLLM raised, and all that finished before has been handed out. EngineNotReadyError: another incarnation.
        """
        if incarnation not in ("", self._incarnation):
            raise EngineNotReadyError("the engine was started again, and has lost its requests")
        results = self._mailboxes.take(client, timeout_s)
        if not results:
            self._must_be_ready()
        return results

    @ray.method(concurrency_group="submit")
    def abort(self, client: str, request_ids: Sequence[str]) -> list[str]:
        """Stop requests. Returns those that it stopped; the others have a result to collect, or were never there."""
        with self._lock:
            ids = [request_id for request_id in dict.fromkeys(request_ids) if (client, request_id) in self._open]
            keys = [self._open.pop((client, request_id)) for request_id in ids]
            for key in keys:
                del self._owners[key]
        if keys:
            self._executor.abort(keys)
        return ids

    @ray.method(concurrency_group="submit")
    def forget_requests(self) -> None:
        """Stop every request of every client: they are gone.

        Raises:
            EngineFailedError, RuntimeError: the engine cannot go on.
        """
        self._must_be_ready()
        with self._lock:
            keys = list(self._owners)
            self._open.clear()
            self._owners.clear()
        if keys:
            self._executor.abort(keys)

    @ray.method(concurrency_group="update")
    def update_weights(self, offered: Any, version: int, options: UpdateOptions) -> WeightUpdate:
        """Replace all weights, and count as `version` from then on. No restart, no file. One update at a time; others queue.
        An engine that sleeps wakes up.

        Args:
            offered: what the transport of `GenerationConfig.refit` offers. host: Hugging Face names to full tensors in host memory, any
                floating dtype, only read; a tied model may leave out lm_head.weight. ipc, nccl: a `Transfer`, whose weights the policy
                sends at the same time.

        Raises:
            WeightMismatchError: found before anything was loaded; the engine goes on with the weights it had.
            GenerationTimeoutError: mode "wait", and requests still ran after `timeout_s`; likewise.
            EngineFailedError: vLLM raised while loading, so the weights are a mixture and the engine refuses further work.
        """
        self._must_be_ready()
        receiving = self._transport.receive(offered, self._layout, self._config.executor == "in_process")
        with self._updating, receiving as (infos, size), self._vllm(f"update to weight version {version}"):
            pause_s = self._executor.load(infos, version, options, self._config.timeout_s)
        self._stale = False
        return WeightUpdate(bytes=size, pause_s=pause_s)

    @ray.method(concurrency_group="update")
    def join_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the communicator of an nccl transfer (`Nccl.vllm_engine`). Returns when all have joined.

        Raises:
            EngineFailedError: it did not come about within `timeout_s`.
        """
        with self._vllm("joining the policy's broadcast"):
            self._executor.join_transfer(init_info, self._config.timeout_s)

    @ray.method(concurrency_group="feed")
    def feed(self, transfer_id: str, info: UpdateInfo) -> None:
        """As `Incoming.feed`: a piece of the weights. Returns when it is loaded."""
        self._transport.incoming(transfer_id).feed(info)

    @ray.method(concurrency_group="health")
    def abandon_transfer(self, transfer_id: str, reason: str) -> None:
        """The policy cannot send the rest: the update that waits for it fails now."""
        self._transport.incoming(transfer_id).close(reason)

    @ray.method(concurrency_group="update")
    def sleep(self, keep_weights: bool = False) -> None:
        """Free GPU memory until the next `update_weights` or request, as `GenerationConfig.sleep_level` says. Idempotent.

        Args:
            keep_weights: in host memory, also at level 2: those that it was started with are still wanted.

        Raises:
            RuntimeError: requests run, or the level is 0. EngineFailedError: vLLM raised.
        """
        self._must_be_ready()
        if self._config.sleep_level == 0:
            raise RuntimeError("generation.sleep_level is 0: this engine cannot sleep")
        if self._open:
            raise RuntimeError(f"{len(self._open)} requests run: an engine sleeps only when nothing does")
        with self._updating:
            if self._executor.asleep:
                return
            with self._vllm("sleep"):
                level = 1 if keep_weights else self._config.sleep_level
                self._executor.sleep(level, self._config.timeout_s)
                self._has_weights = level == 1

    @ray.method(concurrency_group="health")
    def health(self) -> EngineHealth:
        """State, weight version and load. Notices a dead engine core."""
        if self._state == "ready" and self._executor.died():
            self._fail("health: vLLM's engine core is dead")
        updating = self._executor.updating if self._state == "ready" else ""
        version = self._executor.versions.current if self._started and self._state != "stopped" else 0
        return EngineHealth(self._state, version, len(self._open), self._failure, updating, self._stale, self._incarnation)

    def shutdown(self) -> None:
        """End vLLM and its processes. Idempotent."""
        state, self._state = self._state, "stopped"
        if state in ("ready", "failed") and self._started:
            self._executor.shutdown()
            self._mailboxes.close()

    def finished(self, key: str, output: RequestOutput, segments: Segments) -> None:
        """From the executor: a request has ended by itself. Once for each that is not aborted."""
        with self._lock:
            owner = self._owners.get(key)
        if owner is None:
            return  # aborted a moment ago
        result = self._sampling.result(output, owner[1], segments)
        with self._lock:
            if self._owners.pop(key, None) is None:
                return
            del self._open[owner]
        self._mailboxes.put(owner[0], result)

    def failed(self, doing: str, error: BaseException) -> None:
        """From the executor: vLLM raised; it reports nothing more."""
        self._fail(f"{doing}: vLLM raised {type(error).__name__}: {error}")

    @contextmanager
    def _vllm(self, doing: str) -> Iterator[None]:
        """What vLLM raises inside ends the engine; it must be ready."""
        self._must_be_ready()
        try:
            yield
        except GenerationTimeoutError:
            raise
        except Exception as error:
            self.failed(doing, error)
            raise EngineFailedError(self._failure) from error

    @property
    def _started(self) -> bool:
        return hasattr(self, "_executor")

    def _start_again(self) -> None:
        try:
            logger.warning("started again: %s", self.ready())
        except Exception as error:  # noqa: BLE001  (its health says so)
            self._fail(f"start again: {type(error).__name__}: {error}")

    def _wake_up(self) -> None:
        with self._updating:
            if not self._executor.asleep:
                return
            if not self._has_weights:
                raise RequestError("the engine sleeps, and has thrown its weights away (generation.sleep_level 2): refit it first")
            self._executor.wake_up(self._config.timeout_s)

    def _must_be_ready(self) -> None:
        if self._state == "failed":
            raise EngineFailedError(self._failure)
        if self._state != "ready":
            raise EngineNotReadyError(f"the engine is {self._state}, not ready")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._state in ("new", "ready"):  # the first reason stays
                self._state, self._failure = "failed", reason
                logger.error(self._failure)
            self._open.clear()
            self._owners.clear()
        self._mailboxes.close()


def _started_again() -> bool:
    """Whether this is an actor's process that Ray started in place of another."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


def engine_actor_class(cls: type[Engine] = Engine) -> Any:
    """`Engine` for Ray: `.options(name=..., namespace=..., num_cpus=..., num_gpus=...).remote(config, model, seed, eos_ids)`.

    On a CPU give OMP_WAIT_POLICY=passive in the options' runtime_env (OpenMP reads it before any code of ours runs): on cores that
    other actors use too, threads that spin made generation 5 to 7 times slower (two threads, two cores, load 10).
    """
    remote: Any = ray.remote  # Ray's stubs do not know concurrency_groups on classes
    return remote(concurrency_groups={"submit": 1, "collect": COLLECTORS, "update": 1, "feed": 1, "health": 1})(cls)
