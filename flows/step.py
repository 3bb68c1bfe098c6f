"""The stages of one GRPO step, each one Prefect task: here they get their arguments and are timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefect.utilities.annotations import quote

from actors.data_plane.meta import KVBatchMeta
from tasks.advantage import advantage
from tasks.clear import clear
from tasks.logprob import logprob, ref_logprob
from tasks.refit import refit
from tasks.rollout import rollout
from tasks.train import train

if TYPE_CHECKING:
    from flows.session import Session


class Step:
    """Stages in the order of the algorithm; `metrics` gathers what each reports.

    Metadata goes in as `quote(meta)`: Prefect would otherwise walk through every key in search of futures.
    """

    def __init__(self, run: Session, number: int) -> None:
        self._run, self.number = run, number
        self._config = run.config
        self._written: KVBatchMeta | None = None
        self.metrics: dict[str, float] = {}

    def rollout(self) -> KVBatchMeta:
        """Sample responses, score them, store them."""
        with self._timed("rollout"):
            result = rollout(self._run.namespace, self.number, self._run.weight_version, self._config.generation.timeout_s)
        self._written = result.meta
        self._run.samples.write(self.number, "train", result.samples)
        return result.meta

    def logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The policy's own log-probabilities of the samples (the `old` of the ratio)."""
        policy = self._config.policy
        with self._timed("logprob"):
            logprob(self._run.namespace, self.number, quote(batch), policy.timeout_s, policy.why_no_logprob())
        return batch if policy.why_no_logprob() else batch.with_fields("policy_logprobs")

    def ref_logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The reference's log-probabilities, for the KL term."""
        policy = self._config.policy
        with self._timed("ref_logprob"):
            ref_logprob(self._run.namespace, self.number, quote(batch), policy.timeout_s, policy.why_no_ref_logprob())
        return batch if policy.why_no_ref_logprob() else batch.with_fields("reference_logprobs")

    def advantage(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Rewards against their group's mean; returns the rows to train on."""
        config = self._config
        divides = config.policy.parallel.data * config.policy.updates_per_step if config.rollout.dynamic_sampling else None
        with self._timed("advantage"):
            result = advantage(
                self._run.actors.address,
                self.number,
                quote(batch),
                config.policy.loss.normalize_advantages,
                divides,
                config.data_plane.timeout_s,
            )
        self.metrics |= result.metrics
        return result.meta

    def train(self, batch: KVBatchMeta) -> None:
        """Optimizer steps on the batch."""
        with self._timed("train"):
            self.metrics |= train(self._run.namespace, self.number, quote(batch), self._config.policy.timeout_s)

    def refit(self) -> None:
        """The new weights into the engines."""
        with self._timed("refit"):
            result = refit(self._run.namespace, str(self.number), self._run.actors.engines, self._config.policy.timeout_s)
        self._run.weight_version = int(result["weight_version"])
        self.metrics["refit_bytes"] = result["bytes"]

    def clear(self) -> None:
        """This step's keys leave the data plane."""
        if self._written is not None:
            clear(self._run.namespace, self.number, quote(self._written), self._config.data_plane.timeout_s)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        with self._run.time(stage) as timer:
            yield
        self.metrics[f"time/{stage}"] = timer.seconds
