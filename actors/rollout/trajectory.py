"""The tokens of one row: what was given to the model, what it sampled, and with which weights. Pure.

    with_context(prompt)      token_ids  p p p          loss_mask  0 0 0          logprobs  0 0 0          versions  -1 -1 -1
    with_response(sampled)               p p p r r r               0 0 0 1 1 1              0 0 0 l l l              -1 -1 -1 v v v

A single turn is one of each; in a longer episode what the environment says in between is context as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.generation.types import GenerationResult

NO_VERSION = -1  # of a token that no weights have sampled


@dataclass(frozen=True)
class Trajectory:
    """Four values per token, T tokens.

    Attributes:
        token_ids: vocabulary numbers. loss_mask: whether the loss counts the token: the model sampled it.
        logprobs: of sampled tokens, nats, under the distribution that was sampled from; 0 elsewhere.
        versions: of the weights that sampled the token; `NO_VERSION` elsewhere.
    """

    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def with_context(self, token_ids: Sequence[int]) -> Trajectory:
        """And then these, which the model did not sample."""
        count = len(token_ids)
        return self._then(token_ids, [False] * count, [0.0] * count, [NO_VERSION] * count)

    def with_response(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> Trajectory:
        """And then these, which the model sampled.

        Raises:
            ValueError: no token, or another number of log-probabilities or versions than tokens.
        """
        if not token_ids:
            raise ValueError("a response without tokens cannot be trained on")
        for what, values in (("log-probabilities", logprobs), ("weight versions", versions)):
            if len(values) != len(token_ids):
                raise ValueError(f"{len(values)} {what} for {len(token_ids)} response tokens")
        return self._then(token_ids, [True] * len(token_ids), logprobs, versions)

    @staticmethod
    def single_turn(prompt: Sequence[int], result: GenerationResult) -> Trajectory:
        """A prompt and what an engine answered."""
        return Trajectory().with_context(prompt).with_response(result.token_ids, result.logprobs, result.weight_versions)

    @staticmethod
    def demonstration(prompt: Sequence[int], response: Sequence[int]) -> Trajectory:
        """A prompt and the response to learn, which no weights have sampled."""
        return Trajectory().with_context(prompt).with_response(response, [0.0] * len(response), [NO_VERSION] * len(response))

    @property
    def sampled_by(self) -> tuple[int, ...]:
        """Versions of the sampled tokens, in order."""
        return tuple(version for version, counts in zip(self.versions, self.loss_mask, strict=True) if counts)

    def _then(self, token_ids: Sequence[int], loss_mask: Sequence[bool], logprobs: Sequence[float], versions: Sequence[int]) -> Trajectory:
        return Trajectory(
            (*self.token_ids, *token_ids), (*self.loss_mask, *loss_mask), (*self.logprobs, *logprobs), (*self.versions, *versions)
        )
