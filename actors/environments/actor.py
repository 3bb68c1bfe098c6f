"""The environment as an actor: rewards of responses, away from the collector, so that a slow verifier blocks nobody else.

score(problems, responses) ─┬─► ScoringPool: exact, math, python ... ─┬─► combine ─► Verdict of each ─► Tolerance
                            └─► judges: one event loop, one thread ───┘
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.scoring.pool import ScoringPool
from actors.environments.scoring.verdict import Part, Tolerance, Verdict, combine, part_of
from actors.environments.scoring.wire import one_line
from actors.environments.scoring.zygote import Start
from actors.heap import freeze_heap
from configs.environment import EnvironmentConfig
from configs.rewards import AnyReward, JudgeReward, ScoringConfig, gathered_of
from configs.run import ScoredConfig
from configs.secrets import know, resolve

if TYPE_CHECKING:
    from actors.environments.rewards.judge import Judge

SCORING_THREADS = 16  # calls answered at once; all share the same processes and limits
_GRACE_S = 5.0  # beyond a judge's own deadline
_CLOSE_S = 10.0


class EnvironmentActor:
    """Wrapped by `ray.remote` where the run starts its actors. The one process of a run that has the judges' keys.

    Outside Ray it is a context manager. `score` may be called from several threads.

    Args:
        environment: for rewards of the kind `environment`.
        rewards: at least one.
        keys: of judges, by label. secrets: what the other references of environment and rewards refer to, where this process cannot look.

    Raises:
        ConfigError, ScoringError: see `ScoringPool`.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        rewards: Sequence[AnyReward],
        config: ScoringConfig,
        max_new_tokens: int,
        keys: Mapping[str, str],
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        know(secrets)
        self._rewards, self._config = tuple(rewards), config
        local = tuple(reward for reward in rewards if not isinstance(reward, JudgeReward))
        self._stack = ExitStack()
        self._local = tuple(reward.label for reward in local)
        self._pool: ScoringPool | None = None
        if local:
            start = Start(tuple(sys.path), local, environment, max_new_tokens, config)
            self._pool = self._stack.enter_context(ScoringPool(start))
        judges = [reward for reward in rewards if isinstance(reward, JudgeReward)]
        self._judges = self._stack.enter_context(_Judges(judges, keys)) if judges else None
        self._tolerance, self._lock = Tolerance(config), threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ready(self) -> str:
        """A line for the log, once the actor can work."""
        freeze_heap()
        rewards = ", ".join(f"{reward.weight:g} x {reward.label}" for reward in self._rewards)
        if self._pool is None:
            return rewards
        end = "with their PID namespace" if self._pool.namespaces else "by a sweep (no PID namespaces here)"
        return f"{rewards}; {self._pool.processes} scoring processes, whose children end {end}"

    def score(self, problems: Sequence[Problem], responses: Sequence[Response]) -> list[Verdict]:
        """One verdict per (problem, response) pair, within `scoring.batch_timeout_s` and a little.

        Raises:
            ScoringError: too many of the last responses have no reward, or the processes are gone.
        """
        pairs = list(zip(problems, responses, strict=True))
        asked = self._judges.ask(pairs, self._config.batch_timeout_s) if self._judges else None
        calls = [(label, problem, response) for problem, response in pairs for label in self._local]
        parts = iter(self._pool.score(calls) if self._pool else [])
        found = [{label: next(parts) for label in self._local} for _ in pairs]
        if asked is not None:
            for row, graded in zip(found, asked.result(self._config.batch_timeout_s + _GRACE_S), strict=True):
                row.update(graded)
        verdicts = [combine(row, self._rewards, self._config) for row in found]
        with self._lock:
            self._tolerance.add(verdicts)
        return verdicts

    def metrics(self) -> dict[str, float]:
        """scoring/replaced: processes that were killed or died so far; and what the judges say of themselves."""
        found = {"scoring/replaced": float(self._pool.replaced)} if self._pool else {}
        return found | (self._judges.metrics() if self._judges else {})


def keys_and_secrets(config: ScoredConfig, source: EnvironmentConfig) -> tuple[dict[str, str], dict[str, str]]:
    """The judges' keys by label, and the other secrets of environment and rewards: looked up in this process, for actors elsewhere.

    Raises:
        ConfigError: a reference to something that is not there.
    """
    keys = {
        reward.label: resolve(reward.api_key, f"rewards.{reward.label}.api_key")
        for reward in config.paid
        if isinstance(reward, JudgeReward) and reward.api_key is not None
    }
    return keys, source.gathered("environment") | gathered_of(config.paid)


class _Judges:
    """Judges share one event loop in a thread of its own: most of a grade is waiting."""

    def __init__(self, configs: Sequence[JudgeReward], keys: Mapping[str, str]) -> None:
        from actors.environments.rewards.judge import Judge

        self._judges: dict[str, Judge] = {}
        for config in configs:
            url = resolve(config.url, f"rewards.{config.label}.url")
            self._judges[config.label] = Judge(config.model_copy(update={"url": url}), keys.get(config.label))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)

    def __enter__(self) -> _Judges:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for judge in self._judges.values():
            asyncio.run_coroutine_threadsafe(judge.close(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def ask(self, pairs: Sequence[tuple[Problem, Response]], timeout_s: float) -> Future[list[dict[str, Part]]]:
        return asyncio.run_coroutine_threadsafe(self._grade_all(pairs, timeout_s), self._loop)

    def metrics(self) -> dict[str, float]:
        return {f"judge/{label}/{name}": value for label, judge in self._judges.items() for name, value in judge.metrics().items()}

    async def _grade_all(self, pairs: Sequence[tuple[Problem, Response]], timeout_s: float) -> list[dict[str, Part]]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        tasks = [self._grade(judge, problem, response, deadline) for problem, response in pairs for judge in self._judges.values()]
        parts = iter(await asyncio.gather(*tasks))
        return [{label: next(parts) for label in self._judges} for _ in pairs]

    @staticmethod
    async def _grade(judge: Judge, problem: Problem, response: Response, deadline: float) -> Part:
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                value = await judge.grade(problem, response)
        except TimeoutError as error:
            why = str(error) or "no grade before the batch's time was over"
            return Part(None, "timed_out", time.monotonic() - began, one_line(why))
        except Exception as error:  # noqa: BLE001  (this response has no grade; its error is counted and shown)
            return Part(None, "failed", time.monotonic() - began, one_line(f"{type(error).__name__}: {error}"))
        return part_of(value, time.monotonic() - began)
