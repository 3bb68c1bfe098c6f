"""One step of any flow: its stages are Prefect tasks, which get their arguments here and are timed.

A task run costs some milliseconds before and after its work. They hide behind what goes on beside it:

    rollout ─┬► logprob ─► ref_logprob ─┬► train ─┬► refit ─┬► rollout
             └► advantage ──────────────┘         └► clear ─┴► metrics written    (of this step, beside the next one's rollout)

Task runs begin before it is their stage's turn. Those of logprob, ref_logprob and the next step's rollout wait in this process for samples
and weights (tasks/coming.py); train and refit are with the policy group, which begins each one when those before it have ended well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from prefect.futures import PrefectFuture
from prefect.utilities.annotations import quote

from actors.data_plane.meta import KVBatchMeta
from actors.policy.turns import Turn
from tasks.clear import clear
from tasks.data_plane import data_plane_metrics
from tasks.train import train, withdraw

if TYPE_CHECKING:
    from flows.session import Session


class Step:
    """What the steps of all flows share; `metrics` gathers what each stage reports. The loss is called as its flow is.

    Metadata goes in as `quote(meta)`: Prefect would otherwise walk through every key in search of futures.
    """

    def __init__(self, run: Session[Any], number: int) -> None:
        self._run, self.number = run, number
        self._first: PrefectFuture[Any] | None = None
        self._first_timer = ExitStack()
        self._written: KVBatchMeta | None = None
        self._sent: tuple[str, ...] = ()  # stages that are with the policy group, or were
        self._before_train: dict[str, PrefectFuture[Any]] = {}
        self._training: PrefectFuture[dict[str, float]] | None = None
        self._clearing: PrefectFuture[dict[str, float]] | None = None
        self._trained = False
        self.metrics: dict[str, float] = {}

    def train(self, batch: KVBatchMeta) -> None:
        """Optimizer steps on the batch, when the stages before it are done."""
        timeout_s = self._run.config.deadlines.policy_stage
        self._training = train.submit(self._run.namespace, self.number, quote(batch), self._run.flow, timeout_s, self._turn("train"))

    def wait_for_training(self) -> None:
        """What training reported; the step's samples are cleared beside what the step still does."""
        if self._training is None or self._trained:
            return
        for stage, future in self._before_train.items():
            with self._run.time(stage):  # what was still to wait for: the rest of it ran beside other stages
                result = dict(future.result() or {})  # None: skipped
            self.metrics[f"time/{stage}"] = result.pop("logprob_s", 0.0)
            self.metrics |= result
        with self._timed("train"):
            self.metrics |= self._training.result()
        self._trained = True
        self._begin_clear()

    def withdraw(self) -> None:
        """What was sent ahead does not begin any more."""
        if self._sent:
            withdraw(self._run.namespace, self.number)

    def clear(self) -> None:
        """This step's keys have left the data plane when this returns."""
        self._begin_clear()
        if self._clearing is not None:
            self._clearing.result()

    def data_plane(self) -> dict[str, float]:
        """What the data plane did for the run so far. Call after `clear`, which knows it."""
        if self._clearing is not None:
            return self._clearing.result()
        return data_plane_metrics(self._run.namespace, self._run.config.deadlines.clear)

    def _turn(self, stage: str) -> Turn:
        """The stage's turn is when those that were sent before it are done."""
        turn = Turn(self.number, stage, self._sent)
        self._sent += (stage,)
        return turn

    def _begin_clear(self) -> None:
        if self._clearing is None and self._written is not None:
            timeout_s = self._run.config.deadlines.clear
            self._clearing = clear.submit(self._run.namespace, self.number, quote(self._written), timeout_s)

    def _time_first(self, stage: str) -> None:
        """The step's first stage takes from now until `_result_of_first`."""
        self._first_timer.enter_context(self._timed(stage))

    def _result_of_first(self) -> Any:
        """What `_first` returned; what is left of the step before is done meanwhile."""
        assert self._first is not None
        with self._first_timer:
            self._run.finish_last_step()
            return self._first.result()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        with self._run.time(stage) as timer:
            yield
        self.metrics[f"time/{stage}"] = timer.seconds
