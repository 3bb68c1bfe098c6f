"""The stages of one GRPO step, each one Prefect task; `train` and `clear` are those of every flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect.utilities.annotations import quote

from actors.data_plane.meta import KVBatchMeta
from flows.step import Step
from tasks import events
from tasks.advantage import advantage
from tasks.logprob import logprob, ref_logprob
from tasks.refit import refit
from tasks.rollout import rollout

if TYPE_CHECKING:
    from flows.grpo_session import GrpoSession


class GrpoStep(Step):
    """Stages in the order of the algorithm."""

    def __init__(self, run: GrpoSession, number: int) -> None:
        super().__init__(run, number)
        self._run: GrpoSession = run
        self._config = run.config

    def rollout(self) -> KVBatchMeta:
        """Sample responses, score them, store them."""
        with self._timed("rollout"):
            result = rollout(self._run.namespace, self.number, self._run.weight_version, self._config.generation.timeout_s)
        self._written = result.meta
        self._run.show_samples(self.number, "train", result.samples)
        return result.meta

    def logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The policy's own log-probabilities of the samples (the `old` of the ratio); `train` waits for them."""
        policy = self._config.policy
        self._before_train["logprob"] = logprob.submit(
            self._run.namespace, self.number, quote(batch), policy.timeout_s, policy.why_no_logprob()
        )
        return batch if policy.why_no_logprob() else batch.with_fields("policy_logprobs")

    def ref_logprob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The reference's log-probabilities, for the KL term; `train` waits for them."""
        policy = self._config.policy
        self._before_train["ref_logprob"] = ref_logprob.submit(
            self._run.namespace, self.number, quote(batch), policy.timeout_s, policy.why_no_ref_logprob()
        )
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

    def refit(self) -> None:
        """The new weights into the engines."""
        with self._timed("refit"):
            result = refit(self._run.namespace, str(self.number), self._run.actors.engines, self._config.policy.timeout_s)
        self._run.weight_version = int(result["weight_version"])
        self.metrics["refit_bytes"] = result["bytes"]
        events.refit_completed(self.number, result)
