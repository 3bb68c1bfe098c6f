"""From token ids and rewards to columns and tags. Pure.

input_ids            [prompt ........ response ... eos]   int64
token_mask           [0 ............. 1 .......... 1  ]   bool: tokens that the loss counts
generation_logprobs  [0 ............. l .......... l  ]   float32: entry t belongs to input_ids[t]
weight_versions      [-1 ............ v .......... v  ]   int32: of the weights that sampled input_ids[t]
sample_mask          1.0                                  float32 scalar: 0 for a response that is not trained on
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.data_plane.meta import KVBatchMeta, mint_key
from actors.environments.scoring.verdict import Verdict
from actors.generation.types import GenerationResult

ROLLOUT_FIELDS = ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "weight_versions")
SUPERVISED_FIELDS = ("input_ids", "token_mask", "sample_mask")
TRAIN_FIELDS = (*ROLLOUT_FIELDS, "policy_logprobs", "reference_logprobs", "advantages")


def token_columns(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]] | None = None
) -> dict[str, list[torch.Tensor]]:
    """Columns of one row per (prompt, response) pair, as drawn above. Without `logprobs` there is no generation_logprobs.

    Raises:
        ValueError: a response with no token, or with another number of log-probabilities than tokens.
    """
    names = SUPERVISED_FIELDS if logprobs is None else (*SUPERVISED_FIELDS, "generation_logprobs")
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
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


def group_rows(
    partition_id: str,
    weight_version: int,
    uid: str,
    prompt: Sequence[int],
    results: Sequence[GenerationResult],
    verdicts: Sequence[Verdict],
) -> tuple[KVBatchMeta, dict[str, list[torch.Tensor]]]:
    """Keys, tags and columns of one prompt's responses; the uid and the version ride in the tags, so that nobody parses a key.

    Args:
        weight_version: that the keys are minted with. It names the group, together with the uid.
        verdicts: of each response. One that drops its group drops every row.

    Returns:
        The meta, whose tags are prompt_uid, weight_version, start_version and end_version (that sampled the first and the last token),
        weight_versions (how many sampled it), reward, dropped, response_length and truncated; and `ROLLOUT_FIELDS`.

    Raises:
        ValueError: as `token_columns`.
    """
    all_dropped = any(verdict.drop == "group" for verdict in verdicts)
    tags = [
        {
            "prompt_uid": uid,
            "weight_version": weight_version,
            "start_version": result.weight_version_start,
            "end_version": result.weight_version_end,
            "weight_versions": len(result.weight_segments),
            "reward": verdict.reward,
            "dropped": all_dropped or verdict.drop != "no",
            "response_length": len(result.token_ids),
            "truncated": result.finish_reason == "length",
        }
        for result, verdict in zip(results, verdicts, strict=True)
    ]
    meta = KVBatchMeta(
        partition_id=partition_id,
        task_name="rollout",
        keys=tuple(mint_key(weight_version, uid, row) for row in range(len(results))),
        sequence_lengths=tuple(len(prompt) + len(result.token_ids) for result in results),
        tags=tuple(tags),
    )
    columns = token_columns([prompt] * len(results), [r.token_ids for r in results], [r.logprobs for r in results])
    columns["sample_mask"] = [torch.tensor(float(not tag["dropped"])) for tag in tags]
    versions = [torch.tensor([-1] * len(prompt) + result.weight_versions, dtype=torch.int32) for result in results]
    return meta, columns | {"weight_versions": versions}
