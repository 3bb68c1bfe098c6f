"""One step of any flow: its stages are Prefect tasks, which get their arguments here and are timed.

A method that is called `submit_..` returns at once, one that is called `wait_for_..` waits; the page's order is the order of events:

    flow            rollout ─┬─► advantage ─┬─► train, refit are submitted ─► waits
    policy group             └► logprob ─► ref_logprob ─► train ─► refit

Stages of the policy are sent ahead: the group begins each one when those of the step that were sent before it have ended well (turns.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect.futures import PrefectFuture

from actors.data_plane.meta import KVBatchMeta
from actors.policy.turns import Turn
from tasks.call import quoted
from tasks.train import train, withdraw

if TYPE_CHECKING:
    from flows.session import Session

type Metrics = dict[str, float]


class Step:
    """What the steps of all flows share; `metrics` gathers what each stage reports.

    Metadata goes in as `quoted(meta)`.

    Attributes:
        objective: what `train` trains for.
    """

    objective: str

    def __init__(self, run: Session[Any, Any], number: int) -> None:
        self._run, self.number = run, number
        self._sent: tuple[str, ...] = ()  # stages that are with the policy group, or were
        self._futures: dict[str, PrefectFuture[Any]] = {}  # by stage
        self.trained = False
        self.metrics: Metrics = {}

    def submit_train(self, batch: KVBatchMeta) -> None:
        """Optimizer steps on the batch, when the stages before it are done."""
        timeout_s = self._run.config.deadlines.policy_stage
        arguments = self._run.namespace, self.number, quoted(batch), self.objective, timeout_s
        self._futures["train"] = train.submit(*arguments, self._turn("train"))

    def wait_for_train(self) -> None:
        """The weights have changed when this returns."""
        self.metrics |= self._wait_for("train")
        self.trained = True

    def submit_clear(self) -> None:
        """This step's keys leave the data plane; nothing when it has none."""
        if "clear" not in self._futures and (clearing := self._clear()) is not None:
            self._futures["clear"] = clearing

    def wait_for_clear(self) -> None:
        """They have left when this returns; `metrics` has what the data plane did for the run so far."""
        if "clear" in self._futures:
            self.metrics |= self._futures["clear"].result()

    def withdraw(self) -> None:
        """What was sent ahead does not begin any more."""
        if self._sent:
            withdraw(self._run.namespace, self.number)

    def _clear(self) -> PrefectFuture[Metrics] | None:
        raise NotImplementedError

    def _turn(self, stage: str) -> Turn:
        """The stage's turn is when those that were sent before it are done."""
        turn = Turn(self.number, stage, self._sent)
        self._sent += (stage,)
        return turn

    def _wait_for(self, stage: str) -> Any:
        """The result of a stage; what was still to wait for is its time."""
        with self._run.time(stage) as timer:
            result = self._futures[stage].result()
        self.metrics[f"time/{stage}"] = timer.seconds
        return result
