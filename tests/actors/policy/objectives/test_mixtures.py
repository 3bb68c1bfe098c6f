"""Sources with weights of their own against sums over rows and tokens, in every layout of a batch; what a single source must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from actors.data_plane.sharding import plan_batch
from actors.policy.batch import BASE, MicroBatch, build
from actors.policy.objectives.grpo import Grpo
from actors.policy.objectives.sft import Sft
from actors.policy.objectives.weighing import weigh
from configs.base import ConfigError
from configs.batching import BatchingConfig
from configs.loader import load
from configs.loss import LossConfig
from configs.policy import PolicyConfig
from tests.actors.policy import tiny

ROWS, CPU = 9, torch.device("cpu")
LAYOUTS = {
    "padded": {"micro_batch_size": 9},
    "small": {"micro_batch_size": 2, "token_buckets": [16, 32]},
    "dynamic": {"mode": "dynamic", "tokens_per_micro_batch": 64},
    "packed": {"mode": "packed", "tokens_per_micro_batch": 48},
}
AGGREGATIONS: list[dict[str, Any]] = [
    {"aggregation": "token_mean"}, {"aggregation": "sequence_mean"}, {"aggregation": "fixed_length", "aggregation_length": 13},
]  # fmt: skip
MIXED: dict[str, Any] = {
    "kl_coef": 0.2,
    "kl_gradient": "corrected",
    "sources": {
        "a": {"kl_coef": 0, "entropy_coef": 0.1},
        "b": {"policy_gradient_coef": 0, "kl_coef": 1.5},
        "c": {"policy_gradient_coef": 0.5, "cross_entropy_coef": 0.7, "kl_coef": 0.0},
    },
}


def draw(seed: int) -> tuple[Any, dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
    """A meta of three sources, its columns, and what stands for the model: log-probabilities and entropies by row and token."""
    meta, columns = tiny.batch(seed, 50, rows=ROWS, longest=9)
    tags = tuple(tag | {"source": "abc"[row % 3], "masked": row == 1} for row, tag in enumerate(meta.tags))
    generator = torch.Generator().manual_seed(seed)
    for name in ("policy_logprobs", "reference_logprobs"):
        columns[name] = [-2 * torch.rand(length, generator=generator) for length in meta.sequence_lengths]
    fields = {name: (-2 * torch.rand(ROWS, 32, generator=generator)).requires_grad_() for name in ("logprobs", "entropies")}
    return meta.model_copy(update={"tags": tags}), columns, fields


def of_micro_batch(field: torch.Tensor, b: MicroBatch, rows: list[int]) -> torch.Tensor:
    """[S, L]: the field's values of the micro-batch's rows, anything elsewhere."""
    out = torch.full(b.token_mask.shape, -7.0)
    for i, (row, length) in enumerate(zip(b.rows, b.lengths, strict=True)):
        out = out.index_put((torch.full((length,), i), torch.arange(length)), field[rows[row], :length])
    return out


def by_micro_batches(seed: int, loss: LossConfig, layout: str, order: list[int] | None = None) -> Any:
    meta, columns, fields = draw(seed)
    order = order or list(range(ROWS))
    meta, columns = meta.subset(order), {name: [column[row] for row in order] for name, column in columns.items()}
    (plan,) = plan_batch(meta, BatchingConfig(**LAYOUTS[layout]), data_parallel=1).shards
    rows = [int(key.removeprefix("k")) for key in plan.meta.keys]
    shard = {name: [column[order.index(row)] for row in rows] for name, column in columns.items()}
    objective = Grpo(PolicyConfig(loss=loss, recompute_logprobs="always"))
    shard = {name: shard[name] for name in (*BASE, *objective.columns)}
    weights = {name: list(torch.tensor(values).unbind()) for name, values in objective.row_weights(plan.meta).items()}
    micro_batches = weigh(build(shard | weights, plan, CPU), objective)
    results = [objective.loss(b, *(of_micro_batch(fields[name], b, rows) for name in ("logprobs", "entropies"))) for b in micro_batches]
    total = torch.stack([value for value, _ in results]).sum()
    gradients = torch.autograd.grad(total, list(fields.values()), allow_unused=True, materialize_grads=True)
    reported = {name: [float(report.get(name, 0.0)) for _, report in results] for name in objective.reported}
    totals = {name: max(values) if name.endswith("/max") else sum(values) for name, values in reported.items()}
    return total.detach(), gradients, objective.metrics(totals)


def by_hand(seed: int, loss: LossConfig) -> Any:
    """Each component by itself: the sum over its sources' rows, divided by their tokens or rows."""
    meta, columns, fields = draw(seed)
    total = torch.zeros(())
    for component in ("policy_gradient", "kl", "entropy", "cross_entropy"):
        rows, tokens = [], 0
        for row, tag in enumerate(meta.tags):
            weight = loss.coefficient(component, tag["source"])
            if tag["masked"] or weight == 0 or (component == "cross_entropy" and tag["reward"] <= 0):
                continue
            values = []
            for t in columns["token_mask"][row].nonzero()[:, 0].tolist():
                log, old = fields["logprobs"][row, t], columns["policy_logprobs"][row][t]
                ratio, advantage = torch.exp(log - old), columns["advantages"][row]
                gap = columns["reference_logprobs"][row][t] - log
                term = {
                    "policy_gradient": -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage),
                    "kl": ratio * (gap.exp() - gap - 1),
                    "entropy": -fields["entropies"][row, t],
                    "cross_entropy": -log,
                }[component]
                values.append(weight * term)
            tokens += len(values)
            rows.append(torch.stack(values))
        if loss.aggregation == "token_mean":
            total = total + sum(row.sum() for row in rows) / max(tokens, 1)
        else:
            total = total + sum(row.sum() / (len(row) if loss.aggregation == "sequence_mean" else 13) for row in rows) / max(len(rows), 1)
    return total.detach(), torch.autograd.grad(total, list(fields.values()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", AGGREGATIONS, ids=lambda how: how["aggregation"])
@pytest.mark.parametrize(
    "options", [MIXED, {"cross_entropy_coef": 0.4}, {"policy_gradient_coef": 0, "kl_coef": 1, "kl_gradient": "corrected"}]
)
def test_each_component_is_a_mean_over_its_own_rows(layout: str, how: dict[str, Any], options: dict[str, Any]) -> None:
    config = LossConfig(**(options | how))
    total, gradients, metrics = by_micro_batches(40, config, layout)
    expected, wanted = by_hand(40, config)
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=1e-6)
    for found, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, other, atol=1e-6, rtol=1e-6)
    assert metrics["loss"] == pytest.approx(float(total), abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_of_rows_changes_nothing(layout: str) -> None:
    total, gradients, metrics = by_micro_batches(41, LossConfig(**MIXED), "padded")
    moved, others, same = by_micro_batches(41, LossConfig(**MIXED), layout, torch.randperm(ROWS).tolist())
    torch.testing.assert_close(moved, total, atol=1e-6, rtol=1e-6)
    for found, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(found, other, atol=1e-6, rtol=1e-6)
    assert same == pytest.approx(metrics, abs=1e-6, rel=1e-5)


def test_sources_with_the_same_weights_are_one() -> None:
    options: dict[str, Any] = {"kl_coef": 0.2, "entropy_coef": 0.1}
    plain = by_micro_batches(42, LossConfig(**options), "small")
    named = by_micro_batches(42, LossConfig(**options, sources={name: {} for name in "abc"}), "small")
    assert torch.equal(plain[0], named[0])
    assert all(torch.equal(one, other) for one, other in zip(plain[1], named[1], strict=True))
    assert plain[2] == named[2]


def test_the_kl_is_reported_over_the_responses_that_have_it() -> None:
    alone = LossConfig(kl_coef=1.5, kl_gradient="corrected", policy_gradient_coef=0, sources={"a": {"kl_coef": 0}, "c": {"kl_coef": 0}})
    meta, columns, fields = draw(43)
    gaps = [
        (columns["reference_logprobs"][row] - fields["logprobs"].detach()[row, : len(columns["token_mask"][row])], columns, row)
        for row, tag in enumerate(meta.tags)
        if tag["source"] == "b" and not tag["masked"]
    ]
    values = [
        (torch.exp(-gap + columns["reference_logprobs"][row] - columns["policy_logprobs"][row]) * (gap.exp() - gap - 1))[
            columns["token_mask"][row]
        ]
        for gap, columns, row in gaps
    ]
    assert by_micro_batches(43, alone, "padded")[2]["kl"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-5)


def test_supervised_steps_of_a_mixture_share_its_computation() -> None:
    policy = PolicyConfig(loss=LossConfig(**MIXED), recompute_logprobs="always")
    meta, columns, fields = draw(44)
    (plan,) = plan_batch(meta, BatchingConfig(micro_batch_size=9), data_parallel=1).shards
    both = (Grpo(policy), Sft(policy))
    shard = {name: columns[name] for name in (*BASE, *both[0].columns)}
    weights = {name: list(torch.tensor(values).unbind()) for name, values in both[0].row_weights(plan.meta).items()}
    (rollouts,) = weigh(build(shard | weights, plan, CPU), both[0], both)
    (supervised,) = weigh(build({name: columns[name] for name in BASE}, plan, CPU), both[1], both)
    shapes = [{name: (value.shape, value.dtype) for name, value in b.tensors().items()} for b in (rollouts, supervised)]
    assert shapes[0] == shapes[1]
    assert both[0].computation == both[1].computation
    rows = list(range(ROWS))
    logprobs, entropies = (of_micro_batch(fields[name], supervised, rows) for name in ("logprobs", "entropies"))
    (alone,) = weigh(build({name: columns[name] for name in BASE}, plan, CPU), both[1])
    shared, expected = (both[1].loss(b, logprobs, entropies) for b in (supervised, alone))
    assert torch.equal(shared[0], expected[0])
    assert torch.equal(*(torch.autograd.grad(loss, fields["logprobs"], retain_graph=True)[0] for loss, _ in (shared, expected)))


def test_weights_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.loss\.objective dpo learns from pairs of a file: it is of the flow sft"):
        load("arithmetic-cpu", ["policy.loss={objective: dpo}"])
    with pytest.raises(ValidationError, match="nothing is trained"):
        LossConfig(policy_gradient_coef=0)
    mixture = "environment={sources: [{name: sums, task: chain_sum}, {name: words, task: spell_backward}]}"
    with pytest.raises(ConfigError, match=r"policy\.loss\.sources: 'sum' is no name in environment\.sources; did you mean 'sums'"):
        load("arithmetic-cpu", [mixture, "policy.loss.sources={sum: {kl_coef: 1}}"])
    config = load("arithmetic-cpu", [mixture, "policy.loss.kl_coef=0", "policy.loss.sources={sums: {kl_coef: 1}}"])
    assert config.policy.loss.components == ("policy_gradient", "kl")
    assert config.policy.why_no_ref_logprob() is None
