"""From token ids and rewards to columns and tags. Pure.

input_ids            [prompt ........ response ... eos]   int64
token_mask           [0 ............. 1 .......... 1  ]   bool: tokens that the loss counts
generation_logprobs  [0 ............. l .......... l  ]   float32: entry t belongs to input_ids[t]
sample_mask          1.0                                  float32 scalar
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from actors.data_plane.meta import KVBatchMeta, mint_key

ROLLOUT_FIELDS = ("input_ids", "token_mask", "sample_mask", "generation_logprobs")
SUPERVISED_FIELDS = ("input_ids", "token_mask", "sample_mask")
TRAIN_FIELDS = (*ROLLOUT_FIELDS, "policy_logprobs", "reference_logprobs", "advantages")


def token_columns(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]] | None = None
) -> dict[str, list[torch.Tensor]]:
    """Columns of one row per (prompt, response) pair, as drawn above. Without `logprobs` there is no generation_logprobs.

    Raises:
        ValueError: a response with no token, or with another number of log-probabilities than tokens.
    """
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in (ROLLOUT_FIELDS if logprobs is not None else SUPERVISED_FIELDS)}
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not response:
            raise ValueError(f"row {row}: a response without tokens cannot be trained on")
        length, start = len(prompt) + len(response), len(prompt)
        mask = torch.zeros(length, dtype=torch.bool)
        mask[start:] = True
        columns["input_ids"].append(torch.tensor([*prompt, *response], dtype=torch.int64))
        columns["token_mask"].append(mask)
        columns["sample_mask"].append(torch.tensor(1.0))
        if logprobs is not None:
            if len(logprobs[row]) != len(response):
                raise ValueError(f"row {row}: {len(logprobs[row])} log-probabilities for {len(response)} response tokens")
            column = torch.zeros(length)
            column[start:] = torch.tensor(logprobs[row])
            columns["generation_logprobs"].append(column)
    return columns


def group_meta(
    partition_id: str, task_name: str, weight_version: int, prompt_uid: str, lengths: Sequence[int], tags: Sequence[dict[str, Any]]
) -> KVBatchMeta:
    """Keys and tags of one prompt's responses; the uid and the version ride in the tags, so that nobody parses a key."""
    return KVBatchMeta(
        partition_id=partition_id,
        task_name=task_name,
        keys=tuple(mint_key(weight_version, prompt_uid, index) for index in range(len(lengths))),
        sequence_lengths=tuple(lengths),
        tags=tuple({"prompt_uid": prompt_uid, "weight_version": weight_version, **tag} for tag in tags),
    )
