"""From trajectories (what the model was given and what it sampled) and rewards to columns and tags. Pure.

input_ids            [prompt ........ response ... eos]   int64
token_mask           [0 ............. 1 .......... 1  ]   bool: tokens that the loss counts
generation_logprobs  [0 ............. l .......... l  ]   float32: entry t belongs to input_ids[t]
weight_versions      [-1 ............ v .......... v  ]   int32: of the weights that sampled input_ids[t]
sample_mask          1.0                                  float32 scalar: 0 for a response that is not trained on
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.data_plane.meta import KVBatchMeta
from actors.environments.scoring.verdict import Verdict
from actors.generation.types import GenerationResult
from actors.rollout.transitions import Admitted

ROLLOUT_FIELDS = ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "weight_versions")
SUPERVISED_FIELDS = ("input_ids", "token_mask", "sample_mask")
TRAIN_FIELDS = (*ROLLOUT_FIELDS, "policy_logprobs", "reference_logprobs", "teacher_ids", "teacher_logprobs", "advantages")
NO_VERSION = -1  # of a token that no weights have sampled


@dataclass(frozen=True)
class Trajectory:
    """The tokens of one row: four values per token, T tokens.

    A single turn is one context and one response; in a longer episode what the environment says in between is context as well.

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
        """And then these, which the model sampled; as many log-probabilities and versions as tokens."""
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


def token_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[torch.Tensor]]:
    """`ROLLOUT_FIELDS` of one row per trajectory, as drawn above."""
    return {
        "input_ids": [_tensor("q", one.token_ids, torch.int64) for one in trajectories],
        "token_mask": [_tensor("b", one.loss_mask, torch.bool) for one in trajectories],
        "sample_mask": [torch.tensor(1.0) for _ in trajectories],
        "generation_logprobs": [_tensor("f", one.logprobs, torch.float32) for one in trajectories],
        "weight_versions": [_tensor("i", one.versions, torch.int32) for one in trajectories],
    }


def _tensor(code: str, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    # 8,000 values take torch.tensor 12 to 25 times as long.
    return torch.frombuffer(array(code, values), dtype=dtype)


def group_rows(
    partition_id: str,
    place: Admitted,
    trajectories: Sequence[Trajectory],
    truncated: Sequence[bool],
    verdicts: Sequence[Verdict],
    source: str = "",
    *,
    overlong_filtering: bool,
) -> tuple[KVBatchMeta, dict[str, list[torch.Tensor]]]:
    """Keys, tags and columns of one prompt's responses; the uid and the version ride in the tags, so that nobody parses a key.

    Args:
        place: its keys; its version names the group, together with the uid.
        truncated: whether each response had no room to end.
        verdicts: of each response. One that drops its group drops every row.
        source: of the problem, if it has a name.
        overlong_filtering: the loss leaves truncated responses out (DAPO, arXiv 2503.14476, section 3.4), but not their group's mean.

    Returns:
        The meta, whose tags are prompt_uid, weight_version, start_version and end_version (that sampled the first and the last token),
        weight_versions (how many sampled it), reward, dropped, masked (sample_mask is 0: dropped, or left out for its length),
        response_length (sampled tokens), truncated and source, if there is one; and `ROLLOUT_FIELDS`.
    """
    all_dropped = any(verdict.drop == "group" for verdict in verdicts)
    tags = [
        {
            "prompt_uid": place.uid,
            "weight_version": place.version,
            "start_version": versions[0],
            "end_version": versions[-1],
            "weight_versions": len(set(versions)),
            "reward": verdict.reward,
            "dropped": (dropped := all_dropped or verdict.drop != "no"),
            "masked": dropped or (overlong_filtering and cut),
            "response_length": len(versions),
            "truncated": cut,
        }
        | ({"source": source} if source else {})
        for versions, cut, verdict in zip((one.sampled_by for one in trajectories), truncated, verdicts, strict=True)
    ]
    meta = KVBatchMeta(
        partition_id=partition_id,
        task_name="rollout",
        keys=place.keys,
        sequence_lengths=tuple(map(len, trajectories)),
        tags=tuple(tags),
    )
    columns = token_columns(trajectories)
    columns["sample_mask"] = [torch.tensor(float(not tag["masked"])) for tag in tags]
    return meta, columns
