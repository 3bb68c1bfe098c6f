"""DPO against its formula: over any stand-in for the model, in every layout of a batch; and two steps against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.data_plane.sharding import plan_batch
from actors.policy.batch import BASE, build
from actors.policy.objectives.dpo import Dpo, by_row
from actors.policy.objectives.sft import Sft
from actors.policy.objectives.weighing import weigh
from actors.policy.preferences import spread
from configs.batching import BatchingConfig
from configs.policy import PolicyConfig
from tests.actors.policy import reference, tiny
from tests.actors.policy.conftest import OPTIMIZER, PREFERRED
from tests.actors.policy.objectives.test_mixtures import LAYOUTS, of_micro_batch
from tests.actors.policy.test_training import assert_same_weights

ROWS, BETA, CPU = 10, 0.3, torch.device("cpu")
POLICY = PolicyConfig(loss={"objective": "dpo", "dpo_beta": BETA})


def draw(seed: int) -> tuple[Any, dict[str, list[torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Five pairs of which one is not whole, and the two models' log-probabilities by row and token."""
    meta, columns = tiny.batch(seed, 50, rows=ROWS, longest=9)
    generator = torch.Generator().manual_seed(seed)
    policy, other = (-2 * torch.rand(ROWS, 32, generator=generator) for _ in range(2))
    return meta, columns, policy.requires_grad_(), other


def by_hand(columns: Any, policy: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sums = []
    for row, mask in enumerate(columns["token_mask"]):
        sums.append((policy[row, : len(mask)] - other[row, : len(mask)])[mask].sum())
    margins = [
        BETA * (sums[row] - sums[row + 1]) for row in range(0, ROWS, 2) if columns["sample_mask"][row] and columns["sample_mask"][row + 1]
    ]
    return torch.stack([-torch.log(torch.sigmoid(margin)) for margin in margins]).mean(), margins


def in_layout(layout: str, order: list[int], drawn: Any) -> tuple[torch.Tensor, dict[str, float]]:
    meta, columns, policy, other = drawn
    meta, columns = meta.subset(order), {name: [column[row] for row in order] for name, column in columns.items()}
    (plan,) = plan_batch(meta, BatchingConfig(**LAYOUTS[layout]), data_parallel=1).shards
    rows = [int(key.removeprefix("k")) for key in plan.meta.keys]
    shard = {name: [columns[name][order.index(row)] for row in rows] for name in BASE}
    objective, micro_batches = Dpo(POLICY), build(shard, plan, CPU)
    logprobs = [of_micro_batch(policy, b, rows) for b in micro_batches]
    gaps = [mine.detach() - of_micro_batch(other, b, rows) for mine, b in zip(logprobs, micro_batches, strict=True)]
    counts = by_row([torch.ones_like(b.counted) for b in micro_batches], micro_batches, ROWS)
    weights = objective.prefer(plan.meta, by_row(gaps, micro_batches, ROWS), counts, plan.global_sequences, None)
    weighed = weigh([b.with_columns({"cross_entropy": spread(weights, b)}) for b in micro_batches], objective)
    results = [objective.loss(b, mine, torch.zeros_like(mine)) for b, mine in zip(weighed, logprobs, strict=True)]
    (gradient,) = torch.autograd.grad(torch.stack([loss for loss, _ in results]).sum(), policy)
    totals = {name: sum(float(report.get(name, 0.0)) for _, report in results) for name in objective.reported}
    return gradient, objective.metrics(totals)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_gradient_of_the_weights_is_that_of_the_formula(layout: str, shuffled: bool) -> None:
    drawn = draw(50)
    torch.manual_seed(0)
    order = torch.randperm(ROWS).tolist() if shuffled else list(range(ROWS))
    gradient, metrics = in_layout(layout, order, drawn)
    _, columns, policy, other = drawn
    loss, margins = by_hand(columns, policy, other)
    expected = loss.detach()
    assert len(margins) == 4
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, policy)[0], atol=1e-6, rtol=1e-6)
    assert metrics["loss"] == pytest.approx(float(expected), abs=1e-6)
    values = torch.stack(margins).detach()
    assert metrics["preference/margin"] == pytest.approx(float(values.mean()), abs=1e-6)
    assert metrics["preference/accuracy"] == pytest.approx(float((values > 0).float().mean()))
    assert metrics["pairs"] == 4


def test_it_shares_the_computation_of_supervised_steps() -> None:
    assert Dpo(POLICY).computation == Sft(POLICY).computation


@pytest.mark.slow
def test_two_steps_equal_transformers(results: Any, models: dict[str, Path]) -> None:
    ours, path = results("TP1")["dpo"][0], str(models["qwen3-tied"])
    policy, first = reference.load(path), reference.load(path)
    _, columns = tiny.batch(5, 97)
    optimizer = reference.adamw(policy, **OPTIMIZER)

    def margins() -> torch.Tensor:
        sums = []
        for ids, mask in zip(columns["input_ids"], columns["token_mask"], strict=True):
            with torch.no_grad():
                theirs = reference.logprobs(first, ids, 1.0)[mask].sum()
            sums.append(reference.logprobs(policy, ids, 1.0)[mask].sum() - theirs)  # whatever the rollout's temperature is
        return torch.stack([BETA * (sums[row] - sums[row + 1]) for row in (2, 4)])  # the first pair lacks a response

    *trained, evaluated = ours["metrics"]
    for metrics in trained:
        loss = torch.nn.functional.softplus(-margins()).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), PREFERRED["optimizer"]["clip_grad"])
        optimizer.step()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    with torch.no_grad():
        found = margins()
    assert trained[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert evaluated["loss"] == pytest.approx(float(torch.nn.functional.softplus(-found).mean()), abs=1e-5)
    assert evaluated["loss"] < trained[1]["loss"]
    assert (evaluated["pairs"], evaluated["preference/accuracy"]) == (2, 1)
    assert_same_weights(ours["weights"], {name: tensor.detach() for name, tensor in policy.state_dict().items()})
