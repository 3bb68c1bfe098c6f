"""`LLMEngine` in this process, stepped by one thread that does everything else between two steps.

    start, abort, load ──► commands ──► step thread:  ┌► commands ─► update if due ─► step() ─► finished ─┐
                                                      └────────────── while requests run ◄────────────────┘

An update in flight is one command. One that waits keeps starts back until the last running request has ended.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine

from actors.generation.types import UpdateOptions
from actors.generation.vllm_executors import Executor, Job, Sink, must_reset, overdue, prompt_input, record_versions
from actors.refit.transport import UpdateInfo

_STEP_S = 60.0  # longer than any step: an update that waits notices its own deadline between two of them


@dataclass
class _Asked:
    infos: Iterable[UpdateInfo]
    version: int
    options: UpdateOptions
    deadline: float
    pause_s: Future[float] = field(default_factory=Future)


class InProcess(Executor):
    """While nothing else runs, a fixed list of jobs gives the same batches, hence the same bits, each time."""

    def __init__(self, arguments: dict[str, Any], sink: Sink) -> None:
        super().__init__(sink)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._due: _Asked | None = None  # waits for the running requests to end
        self._held: list[Job] = []  # started meanwhile
        self._asked: _Asked | None = None  # the last one, whose caller may be waiting
        self._error: BaseException | None = None
        self._doing = "generate"
        self._ended = False
        self._llm: LLMEngine
        started: Future[None] = Future()
        # The thread that steps the model also makes it, and nobody else touches it.
        self._thread = threading.Thread(target=self._run, args=(arguments, started), name="vllm-steps", daemon=True)
        self._thread.start()
        started.result()
        self._read_limits(self._llm.model_config)

    def start(self, jobs: Sequence[Job]) -> None:
        self._commands.put(lambda: self._add(jobs))

    def abort(self, keys: Sequence[str]) -> None:
        self._commands.put(lambda: self._abort(set(keys)))

    def join_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        self._do(lambda: self._rpc("init_weight_transfer_engine", init_info=init_info), timeout_s)

    def sleep(self, level: int, timeout_s: float) -> None:
        self._do(lambda: self._llm.sleep(level), timeout_s)
        self.asleep = True

    def wake_up(self, timeout_s: float) -> None:
        self._do(self._llm.wake_up, timeout_s)
        self.asleep = False

    def load(self, infos: Iterable[UpdateInfo], version: int, options: UpdateOptions, timeout_s: float) -> float:
        asked = self._asked = _Asked(infos, version, options, time.monotonic() + timeout_s)
        if self._error is not None:
            raise self._error

        def command() -> None:
            if options.mode == "in_flight":
                self._load(asked)
            else:
                self._due = asked
                self.updating = "waiting for running requests to end"

        self._commands.put(command)
        return asked.pause_s.result(timeout_s + _STEP_S)

    def shutdown(self) -> None:
        def command() -> None:
            self._ended = True

        self._commands.put(command)
        self._thread.join(_STEP_S)
        self._llm.engine_core.shutdown()

    def _run(self, arguments: dict[str, Any], started: Future[None]) -> None:
        try:
            _register_architecture(arguments["model"])
            self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
            record_versions(self._llm.output_processor, self.versions)
        except BaseException as error:  # noqa: BLE001  (`started` raises it in the thread that waits)
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._ended:
                self._obey()
                self._load_if_due()
                if self._llm.has_unfinished_requests():
                    self._step()
        except BaseException as error:  # noqa: BLE001  (there is no caller to raise it to)
            self._error = error
            if self._asked is not None and not self._asked.pause_s.done():
                self._asked.pause_s.set_exception(error)
            self._sink.failed(self._doing, error)

    def _rpc(self, method: str, **arguments: Any) -> None:
        self._llm.collective_rpc(method, kwargs=arguments)

    def _do(self, command: Callable[[], None], timeout_s: float) -> None:
        """Run it in the thread that steps the model, and wait for its end."""
        done: Future[None] = Future()

        def answered() -> None:
            try:
                command()
            except Exception as error:  # noqa: BLE001  (the caller raises it)
                done.set_exception(error)
            else:
                done.set_result(None)

        if self._error is not None:
            raise self._error
        self._commands.put(answered)
        done.result(timeout_s)

    def _obey(self) -> None:
        # An idle engine sleeps until the next command; a running one only picks up those that are there.
        idle = not self._llm.has_unfinished_requests() and self._due is None
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            command()
            idle = False

    def _step(self) -> None:
        for output in self._llm.step():
            segments = self.versions.pop(output.request_id)
            self._sink.finished(output.request_id, cast(RequestOutput, output), segments)  # pooling models are not served here

    def _add(self, jobs: Sequence[Job]) -> None:
        if self._due is not None:
            self._held.extend(jobs)
            return
        for job in jobs:
            self._llm.add_request(job.key, prompt_input(job, self.versions.current), job.params)

    def _abort(self, keys: set[str]) -> None:
        self._held = [job for job in self._held if job.key not in keys]
        self._llm.abort_request(sorted(keys))
        for key in keys:
            self.versions.pop(key)

    def _load_if_due(self) -> None:
        asked, running = self._due, self._llm.get_num_unfinished_requests()
        if asked is None or (running and time.monotonic() < asked.deadline):
            return
        self._due = None
        if running:
            self.updating = ""
            asked.pause_s.set_exception(overdue(asked.version, running))
        else:
            self._load(asked)
        held, self._held = self._held, []
        self._add(held)

    def _load(self, asked: _Asked) -> None:
        began, running = time.monotonic(), self._llm.has_unfinished_requests()
        self.updating = f"loading weight version {asked.version}"
        self._doing = f"update to weight version {asked.version}"
        core = cast(InprocClient, self._llm.engine_core).engine_core
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:  # asynchronous scheduling, on a GPU: a step that has begun ends under the old weights
            self._step()
        if self.asleep:
            self._llm.wake_up(["weights"])
        self._rpc("start_weight_update")
        for info in asked.infos:
            self._rpc("update_weights", update_info=info)
        self._rpc("finish_weight_update")
        if self.asleep:
            self._llm.wake_up(["kv_cache"])
            self.asleep = False
        if asked.options.recompute_kv_cache or not running:
            must_reset(self._llm.reset_prefix_cache(reset_running_requests=True))
        core.resume_scheduler()
        self._doing, self.updating = "generate", ""
        ended = time.monotonic()
        self.versions.loaded(asked.version, ended)
        asked.pause_s.set_result(ended - began if running else 0.0)


def _register_architecture(model_path: str) -> None:
    # Else vLLM starts a second Python (17 s on two cores) just to look at the model class that this process is about to import.
    for name in json.loads((Path(model_path) / "config.json").read_text()).get("architectures", []):
        if name in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
