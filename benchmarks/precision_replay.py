"""Each operation on the engine's own inputs: which give other bits, and whether by the kernel or by the shape of the call. Of `precision`.

    engine, token by token ──── inputs of every operation ────┬─► engine, all tokens at once    other bits: its kernel depends on the shape
                           └─── its results ── compared with ─┴─► trainer, all tokens at once   other bits there alone: another kernel

Nothing accumulates: what an operation gave is compared, and replaced by what the engine had, before the next one reads it. Where no
operation gives other bits, engine and trainer have the same log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.precision_hooks import Key

Rows = Mapping[Key, torch.Tensor]


def following(sampled: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
    """What the trainer's pass over prompt and response is to follow. An engine has logits of what it samples: others are 0 here."""
    operations = dict(sampled["operations"])
    logits = operations["head", 0][: len(sampled["response"])]
    operations["head", 0] = torch.cat([logits.new_zeros(len(sampled["prompt"]) - 1, logits.shape[1]), logits])
    return operations


def replayed(sampled: Sequence[Mapping[str, Any]], scored: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By operation, in order: how its results on the engine's inputs differ from the engine's token by token.

    Returns:
        By operation `engine` and `trainer`, each with `layers`, those whose bits are all equal (`equal`), and the largest relative
        difference (`largest`; of log-softmax absolute). A side that does not compute the operation apart is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    for side, records in (("engine", sampled), ("trainer", scored)):
        differences: dict[Key, float] = {}
        for one, other in zip(sampled, records, strict=True):
            for key, gap in _differences(one, other["replay"]):
                differences[key] = max(gap, differences.get(key, 0.0))
        for name in dict.fromkeys(name for name, _ in differences):
            gaps = [gap for (other_name, _), gap in differences.items() if other_name == name]
            found.setdefault(name, {})[side] = {"layers": len(gaps), "equal": sum(gap == 0 for gap in gaps), "largest": max(gaps)}
    return found


def table(report: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the terminal."""
    for name, row in report.items():
        sides = (f"{side}: {words(row[side]) if side in row else 'not apart':38}" for side in ("engine", "trainer"))
        yield f"  {name:22} {' '.join(sides)}".rstrip()


def words(row: Mapping[str, Any]) -> str:
    """How near to the engine's results."""
    if row["equal"] == row["layers"]:
        return "equal to the bit"
    return f"up to {row['largest']:.2g}, equal in {row['equal']} of {row['layers']}"


def _differences(one: Mapping[str, Any], replay: Mapping[str, Any]) -> Iterator[tuple[Key, float]]:
    prompt, response = len(one["prompt"]), len(one["response"])
    for key, given in one["operations"].items():
        rows = replay["operations"].get(key)
        if rows is None:
            continue
        if key[0] == "head":
            given, rows = given[:response], rows[-response:] if len(rows) == response else rows[prompt - 1 :][:response]
        else:
            given = given[: prompt + response - 1]  # the last token goes through no engine
            rows = rows[: len(given)]
        yield key, relative(rows[..., : given.shape[-1]], given)
    if "logprobs" in replay:
        yield ("log-softmax", 0), max(abs(a - b) for a, b in zip(replay["logprobs"], one["logprobs"], strict=True))


def relative(rows: torch.Tensor, given: torch.Tensor) -> float:
    """|rows - given| / |given| as norms; 0 only where all bits are equal."""
    if torch.equal(rows, given):
        return 0.0
    return max(float((rows.double() - given.double()).norm() / given.double().norm()), 1e-30)  # other bits are never 0
