"""`AsyncLLM` on a loop thread; the model lives in the engine core's process, and requests join a running batch there.

start, abort, load ──► loop thread [ AsyncLLM ] ──zmq──► engine core process
                         └ one task per request: finished
load:  door shut ─► (mode "wait": the last request ends) ─► pause ─► load ─► (reset) ─► resume ─► door open
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, cast

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from actors.forks.server import fork_children
from actors.generation.types import UpdateOptions
from actors.generation.vllm_executors import Executor, Job, Sink, must_reset, overdue, prompt_input, record_versions
from actors.refit.transport import UpdateInfo

_LOOK_S = 0.01  # between two looks at whether the running requests have ended


class Async(Executor):
    """Everything but construction and shutdown runs on the loop."""

    def __init__(self, arguments: dict[str, Any], sink: Sink, timeout_s: float) -> None:
        super().__init__(sink)
        self._loop = asyncio.new_event_loop()
        self._door = asyncio.Lock()  # held while requests are added, and during an update
        self._wanted: set[str] = set()  # started, neither ended nor aborted
        self._running: set[str] = set()  # handed to vLLM
        self._tasks: set[asyncio.Task[None]] = set()
        # vLLM's core process is a child of this thread, which lives as long as the actor does.
        threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True).start()
        self._llm: AsyncLLM = self._wait(self._begin(arguments), timeout_s, "the engine core to start")
        self._read_limits(self._llm.model_config)

    def start(self, jobs: Sequence[Job]) -> None:
        self._loop.call_soon_threadsafe(self._start, jobs)

    def abort(self, keys: Sequence[str]) -> None:
        self._loop.call_soon_threadsafe(self._abort, keys)

    def join_transfer(self, init_info: dict[str, Any], timeout_s: float) -> None:
        work = self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        self._wait(work, timeout_s, "the engine core to join the policy's broadcast")

    def load(self, infos: Iterable[UpdateInfo], version: int, options: UpdateOptions, timeout_s: float) -> float:
        try:
            work = self._load(infos, version, options, time.monotonic() + timeout_s)
            return self._wait(work, timeout_s + 1.0, "the engine core to load the weights")
        finally:
            self.updating = ""

    def sleep(self, level: int, timeout_s: float) -> None:
        self._wait(self._llm.sleep(level), timeout_s, "the engine core to free its GPU memory")
        self.asleep = True

    def wake_up(self, timeout_s: float) -> None:
        self._wait(self._llm.wake_up(), timeout_s, "the engine core to take its GPU memory")
        self.asleep = False

    def died(self) -> bool:
        return bool(self._llm.errored)

    def shutdown(self) -> None:
        self._llm.shutdown(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait[T](self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        # The deadline is set inside the loop: there it cancels the work.
        async def bounded() -> T:
            deadline = asyncio.timeout(timeout_s)
            try:
                async with deadline:
                    return await work
            except TimeoutError:
                if deadline.expired():
                    raise TimeoutError(f"waited {timeout_s:.0f} s for {what}") from None
                raise

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()

    async def _begin(self, arguments: dict[str, Any]) -> AsyncLLM:
        fork_children()
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        record_versions(llm.output_processor, self.versions)
        return llm

    def _start(self, jobs: Sequence[Job]) -> None:
        self._wanted.update(job.key for job in jobs)
        self._spawn(self._add(jobs))

    def _abort(self, keys: Sequence[str]) -> None:
        self._wanted.difference_update(keys)
        self._spawn(self._llm.abort([key for key in keys if key in self._running]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  (there is no caller to raise it to)
                self._sink.failed("generate", error)

        task = self._loop.create_task(guarded())
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def _add(self, jobs: Sequence[Job]) -> None:
        async with self._door:
            for job in jobs:
                if job.key in self._wanted:
                    outputs = await self._llm.add_request(job.key, prompt_input(job, self.versions.current), job.params)
                    self._running.add(job.key)
                    self._spawn(self._follow(job.key, outputs))

    async def _follow(self, key: str, outputs: RequestOutputCollector) -> None:
        try:
            output = cast(RequestOutput, await outputs.get())  # final ones only, so the first is the last
            segments = self.versions.pop(key)
            if key in self._wanted:
                self._sink.finished(key, output, segments)
        finally:
            self._wanted.discard(key)
            self._running.discard(key)

    async def _load(self, infos: Iterable[UpdateInfo], version: int, options: UpdateOptions, deadline: float) -> float:
        async with self._door:
            self.updating = "waiting for running requests to end"
            while options.mode == "wait" and self._running:
                if time.monotonic() > deadline:
                    raise overdue(version, len(self._running))
                await asyncio.sleep(_LOOK_S)
            began, running = time.monotonic(), bool(self._running)
            # AsyncLLM.pause_generation does this and sleeps 20 ms more, so that outputs are seen first: their times tell them apart here.
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            still = time.monotonic()
            if self.asleep:
                await self._llm.wake_up(["weights"])
            await self._llm.start_weight_update()
            left, piece = iter(infos), 0
            self.updating = "waiting for the policy's weights"
            while (info := await asyncio.to_thread(next, left, None)) is not None:
                piece += 1
                self.updating = f"loading piece {piece} of weight version {version}"
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
                self.updating = f"waiting for piece {piece + 1} of the policy's weights"
            await self._llm.finish_weight_update()
            if self.asleep:
                await self._llm.wake_up(["kv_cache"])
                self.asleep = False
            if options.recompute_kv_cache or not running:
                must_reset(await self._llm.reset_prefix_cache(reset_running_requests=True))
            self.versions.loaded(version, still)
            await self._llm.resume_generation()
            return time.monotonic() - began if running else 0.0
