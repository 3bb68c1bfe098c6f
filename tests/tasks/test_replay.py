"""A step that was made again against what was kept of it: one value that is another is named with its place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints.errors import CheckpointError
from actors.data_plane.meta import KVBatchMeta
from tasks.reporting.replay import Bound, Bounds, Replayed, Rows, as_markdown, as_text, bounds_of, compare_columns, compare_metrics

Columns = dict[str, list[torch.Tensor]]
EXACT, FLOAT32, BFLOAT16 = (
    bounds_of(True, "float32", "float32", "float32"),
    bounds_of(False, "float32", "float32", "float32"),
    bounds_of(False, "bfloat16", "float32", "bfloat16"),
)
LOGPROBS = ("policy_logprobs", "reference_logprobs", "generation_logprobs")


def batch(groups: int, responses: int, seed: int) -> tuple[KVBatchMeta, Columns]:
    """Groups one after the other in a shuffled order, each row with a prompt and a response; weights of version 3, and some of 2."""
    source = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=source))

    uids = [f"p{group}" for group in torch.randperm(groups, generator=source).tolist() for _ in range(responses)]
    prompts, answers = [number(1, 4) for _ in uids], [number(1, 5) for _ in uids]
    lengths = [a + b for a, b in zip(prompts, answers, strict=True)]
    columns: Columns = {"input_ids": [torch.randint(0, 50, (n,), generator=source) for n in lengths]}
    columns["token_mask"] = [torch.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)]
    versions = [2 + (row % 3 > 0) for row in range(len(uids))]
    columns["weight_versions"] = [
        torch.where(mask, version, -1).int() for mask, version in zip(columns["token_mask"], versions, strict=True)
    ]
    logprobs = [-torch.rand(n, generator=source) * mask for n, mask in zip(lengths, columns["token_mask"], strict=True)]
    columns |= {name: [row.clone() for row in logprobs] for name in LOGPROBS}
    columns["advantages"] = [torch.tensor(float(row)) for row in range(len(uids))]
    meta = KVBatchMeta(
        partition_id="train",
        keys=tuple(f"key-{row}" for row in range(len(uids))),
        sequence_lengths=tuple(lengths),
        tags=tuple({"prompt_uid": uid, "weight_version": 0} for uid in uids),
    )
    return meta, columns


def compared(meta: KVBatchMeta, kept: Columns, again: Columns, bounds: Bounds = EXACT) -> dict[str, Any]:
    rows = Rows(meta, kept["input_ids"], lambda token: f"<{token}>")
    return {one.name: one for one in compare_columns(rows, kept, again, 3, bounds)}


def copied(columns: Columns) -> Columns:
    return {name: [row.clone() for row in rows] for name, rows in columns.items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    name=st.sampled_from(["policy_logprobs", "reference_logprobs"]),
    bounds=st.sampled_from([EXACT, FLOAT32]),
    data=st.data(),
)
def test_any_single_value_beyond_its_bound_is_named(
    seed: int, shape: tuple[int, int], name: str, bounds: Bounds, data: st.DataObject
) -> None:
    meta, again = batch(*shape, seed)
    kept = copied(again)
    row = data.draw(st.integers(0, len(meta) - 1))
    position = data.draw(st.sampled_from(kept["token_mask"][row].nonzero().flatten().tolist()))
    by = data.draw(st.sampled_from([1e-3, -0.5, 3.0, math.inf, math.nan]))
    kept[name][row][position] += by
    found = compared(meta, kept, again, bounds)
    first = found[name].first
    assert {one for one in found if found[one].verdict == "beyond"} == {name}
    assert found[name].differing == 1
    assert (first.key, first.group, first.position) == (meta.keys[row], meta.tags[row]["prompt_uid"], position)
    assert first.response == row % shape[1]
    assert (first.token, first.text) == (int(kept["input_ids"][row][position]), f"<{int(kept['input_ids'][row][position])}>")
    assert first.again == float(again[name][row][position])
    assert found[name].largest == pytest.approx(abs(by), rel=1e-2) or not math.isfinite(by)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_what_is_within_its_bound_or_does_not_count_is_not_named(seed: int, data: st.DataObject) -> None:
    meta, again = batch(3, 3, seed)
    kept = copied(again)
    row = data.draw(st.integers(0, len(meta) - 1))
    kept["policy_logprobs"][row][-1] += 5e-5
    kept["reference_logprobs"][row][0] += 7.0  # of the prompt
    found = compared(meta, kept, again, FLOAT32)
    assert {name: one.verdict for name, one in found.items()} == {
        "policy_logprobs": "within", "generation_logprobs": "bit-equal", "reference_logprobs": "bit-equal", "advantages": "bit-equal",
    }  # fmt: skip
    assert found["policy_logprobs"].differing == 1
    assert found["policy_logprobs"].first is None


def test_the_first_of_several_comes_in_the_order_of_the_batch() -> None:
    meta, again = batch(2, 2, 1)
    kept = copied(again)
    for row in (3, 1, 2):
        kept["policy_logprobs"][row][-1] += row
    found = compared(meta, kept, again)["policy_logprobs"]
    assert (found.differing, found.first.key, found.largest) == (3, "key-1", pytest.approx(3))


def test_advantages_are_named_by_response() -> None:
    meta, again = batch(2, 3, 2)
    kept = copied(again)
    kept["advantages"][4] += 0.125
    first = compared(meta, kept, again)["advantages"].first
    assert (first.key, first.response, first.position, first.token) == ("key-4", 1, None, None)
    assert "response 1: logged 4.125, again 4" in str(first)


def test_engines_are_held_to_the_weights_that_they_sampled_with() -> None:
    meta, again = batch(2, 3, 3)
    kept = copied(again)
    for row in (0, 3):  # of version 2
        kept["generation_logprobs"][row] -= 1.0
    assert compared(meta, kept, again)["generation_logprobs"].verdict == "bit-equal"
    kept["generation_logprobs"][1][-1] -= 0.01
    assert compared(meta, kept, again)["generation_logprobs"].first.key == "key-1"
    loose = compared(meta, kept, again, BFLOAT16)["generation_logprobs"]
    assert (loose.verdict, loose.first) == ("within", None)  # bounded in the mean alone
    kept["generation_logprobs"][2][-1] -= 5.0
    assert compared(meta, kept, again, BFLOAT16)["generation_logprobs"].first.key == "key-2"  # then the worst is named


def test_columns_that_are_not_kept_are_not_compared() -> None:
    meta, again = batch(2, 2, 4)
    kept = copied(again)
    del kept["policy_logprobs"], again["reference_logprobs"]
    assert compared(meta, kept, again).keys() == {"generation_logprobs", "advantages"}
    kept = copied(again)
    again["policy_logprobs"][1] = again["policy_logprobs"][1][:-1]
    with pytest.raises(CheckpointError, match="'policy_logprobs'"):
        compared(meta, kept, again)


def test_metrics() -> None:
    logged = {"loss": 0.5, "kl": math.nan, "grad_norm": 2.0, "logprob_error/max": 1e-5, "train_s": 1.0, "time/train": 2.0, "reward/mean": 1}
    again = {**logged, "loss": 0.5 + 2e-5, "grad_norm": 2.0 + 8e-4, "train_s": 9.0, "lr": 1e-4}

    def verdicts(bounds: Bounds, **other: float) -> dict[str, str]:
        return {one.name: one.verdict for one in compare_metrics(logged, again | other, bounds)}

    same = {"kl": "bit-equal", "logprob_error/max": "bit-equal", "reward/mean": "bit-equal"}
    assert verdicts(EXACT) == same | {"loss": "beyond", "grad_norm": "beyond"}
    assert verdicts(FLOAT32) == same | {"loss": "within", "grad_norm": "within"}
    assert verdicts(FLOAT32, loss=0.51)["loss"] == verdicts(FLOAT32, loss=math.nan)["loss"] == "beyond"
    assert verdicts(BFLOAT16, loss=0.51)["loss"] == "within"
    assert verdicts(BFLOAT16, loss=math.inf)["loss"] == verdicts(BFLOAT16, kl=0.0)["kl"] == "beyond"


def test_only_the_same_float32_is_held_to_the_bit() -> None:
    assert EXACT.column == Bound(largest=0, mean=0)
    assert (EXACT.metric, FLOAT32.metric) == (0, 1e-4)
    assert bounds_of(True, "bfloat16", "bfloat16", "bfloat16").column == BFLOAT16.column == Bound(largest=0.1, mean=0.02)


def test_an_engine_that_disagreed_by_more_than_the_bound_may_do_so_again() -> None:
    assert [bounds_of(False, "bfloat16", "float32", "bfloat16", found).engine.mean for found in (0.0, 0.01, 0.03)] == [0.02, 0.02, 0.033]
    assert bounds_of(True, "float32", "float32", "float32", 0.0375).engine == Bound(largest=1e-3, mean=1e-3)


def replayed(bounds: Bounds, **changed: float) -> Replayed:
    """Of one batch, whose last value of each named column was another when it was kept."""
    meta, again = batch(2, 2, 5)
    kept = copied(again)
    for name, by in changed.items():
        kept[name][-1][-1] += by
    columns = compare_columns(Rows(meta, kept["input_ids"], lambda _: "a|\n"), kept, again, 3, bounds)
    metrics = compare_metrics({"loss": 0.25, "kl": 0.0}, {"loss": 0.25, "kl": 0.0}, bounds)
    return Replayed(run="mine", step=7, since=5, before="gpu", here="cpu", bounds=bounds, columns=columns, metrics=metrics)


def test_the_verdict_on_a_step() -> None:
    assert replayed(EXACT).verdict == "bit-equal"
    assert replayed(EXACT, generation_logprobs=1e-6).verdict == "bit-equal"
    assert replayed(FLOAT32, reference_logprobs=1e-6).verdict == "within"
    assert replayed(EXACT, reference_logprobs=1e-6).verdict == "beyond"
    assert replayed(FLOAT32, reference_logprobs=1e-2).verdict == "beyond"


def test_what_a_person_reads() -> None:
    text = as_text(replayed(FLOAT32, reference_logprobs=1e-2))
    assert "mine, step 7, from the checkpoint after step 5 (2 steps again); float32, on another layout or device" in text
    assert "before: gpu" in text
    assert "reference_logprobs: group p" in text
    assert text.splitlines()[-1] == "beyond the bounds"
    page = as_markdown(replayed(FLOAT32, reference_logprobs=1e-2))
    assert page.startswith("# Step 7: beyond\n")
    assert "| loss | 0.25 | 0.25 | bit-equal |" in page
    assert Replayed.model_validate(replayed(BFLOAT16).model_dump()) == replayed(BFLOAT16)
