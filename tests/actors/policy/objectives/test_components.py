"""The losses against a token-by-token reference, and how they split."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from actors.policy.batch import MicroBatch
from actors.policy.objectives.grpo import Grpo
from actors.policy.objectives.importance import CORRECTION_SUMS, correction_metrics, importance_weights, sequence_mask
from actors.policy.objectives.sft import Sft
from configs.loss import LossConfig
from configs.policy import PolicyConfig
from tests.actors.policy import reference
from tests.actors.policy.objectives.batches import loss_of, micro_batch

ROWS, LENGTH = 7, 11
COLUMNS = {"policy_logprobs": "old_logprobs", "reference_logprobs": "reference_logprobs", "generation_logprobs": "generation_logprobs"}
ALWAYS = {"loss", "tokens", "entropy", "clipped", "ratio", "ratio/max", "logprob_error", "logprob_error/max"}
KL = {"kl", "kl_tokens"}


def draw(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    mask = torch.rand(ROWS, LENGTH) < 0.6
    mask[:, -1] = True  # every row has a token
    return {
        "logprobs": (-torch.rand(ROWS, LENGTH)).requires_grad_(),
        "old_logprobs": -torch.rand(ROWS, LENGTH),
        "advantages": torch.randn(ROWS),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1]),
        "reference_logprobs": -torch.rand(ROWS, LENGTH),
        "generation_logprobs": -torch.rand(ROWS, LENGTH),
    }


def batch_of(data: dict[str, Any], rows: slice = slice(None)) -> MicroBatch:
    columns = {name: data[ours][rows] for name, ours in COLUMNS.items() if data[ours] is not None}
    columns["advantages"] = data["advantages"][rows, None].expand(-1, LENGTH)
    return micro_batch(data["token_mask"][rows], data["sample_mask"][rows], columns, tokens=int(data["token_mask"].sum()), sequences=ROWS)


def grpo(data: dict[str, Any], config: LossConfig) -> Grpo:
    return Grpo(PolicyConfig(loss=config, recompute_logprobs="auto" if data["old_logprobs"] is None else "always"))


def ours(data: dict[str, Any], config: LossConfig, rows: slice = slice(None)) -> Any:
    return loss_of(grpo(data, config), batch_of(data, rows), data["logprobs"][rows])


def whole_batch(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).max() if name.endswith("/max") else torch.stack(parts).sum()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_equals_the_reference_with_its_gradient(kl_coef: float, aggregation: Any) -> None:
    config = LossConfig(clip_low=0.1, clip_high=0.3, kl_coef=kl_coef, aggregation=aggregation)
    data = draw()
    loss, _ = ours(data, config)
    (gradient,) = torch.autograd.grad(loss, data["logprobs"])
    expected = reference.grpo(
        data["logprobs"], data["old_logprobs"], data["reference_logprobs"] if kl_coef else None, data,
        low=0.1, high=0.3, kl_coef=kl_coef, aggregation=aggregation,
    )  # fmt: skip
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, data["logprobs"])[0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_splitting_the_batch_changes_nothing(aggregation: Any) -> None:
    config = LossConfig(kl_coef=0.2, aggregation=aggregation)
    data = draw(1)
    whole, sums = ours(data, config)
    (gradient,) = torch.autograd.grad(whole, data["logprobs"])
    parts = [ours(data, config, rows) for rows in (slice(0, 1), slice(1, 5), slice(5, ROWS))]
    total = sum(part[0] for part in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, data["logprobs"])[0], gradient)
    for name, value in sums.items():
        together = whole_batch(name, [part[1][name] for part in parts])
        torch.testing.assert_close(together, value)


def test_metrics_are_sums_over_counted_tokens() -> None:
    data = draw(2)
    config = LossConfig(clip_low=0.05, clip_high=0.1, kl_coef=0.5)
    _, sums = ours(data, config)
    counted = (data["token_mask"] * data["sample_mask"][:, None]).bool()
    ratio = (data["logprobs"] - data["old_logprobs"]).exp()
    gap = data["reference_logprobs"] - data["logprobs"]
    binding = torch.where(data["advantages"][:, None] > 0, ratio > 1.1, ratio < 0.95)
    torch.testing.assert_close(sums["ratio"], ratio[counted].sum().detach())
    torch.testing.assert_close(sums["kl"], (gap.exp() - gap - 1)[counted].sum().detach())
    assert sums["clipped"] == (binding & counted).sum()
    assert sums["ratio/max"] == ratio[counted].max()


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_policy_gradient() -> None:
    data = draw(3) | {"old_logprobs": None, "reference_logprobs": None}
    loss, sums = ours(data, LossConfig())
    counted = data["token_mask"] * data["sample_mask"][:, None]
    (gradient,) = torch.autograd.grad(loss, data["logprobs"])
    torch.testing.assert_close(gradient, -data["advantages"][:, None] * counted / data["token_mask"].sum())
    assert sums["ratio"] == counted.sum()
    assert sums["clipped"] == 0


def test_what_stands_at_masked_positions_does_not_matter() -> None:
    data, wild = draw(4), draw(4)
    for name in ("old_logprobs", "reference_logprobs"):
        wild[name] = torch.where(wild["token_mask"], wild[name], -1e4)
    config = LossConfig(kl_coef=0.2)
    loss, other = ours(data, config)[0], ours(wild, config)[0]
    assert torch.equal(loss, other)
    assert torch.isfinite(torch.autograd.grad(other, wild["logprobs"])[0]).all()


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, set()),
        ({"loss": {"kl_coef": 0.1}}, {"reference_logprobs"}),
        ({"recompute_logprobs": "always"}, {"policy_logprobs"}),
        ({"updates_per_step": 2, "loss": {"kl_coef": 0.1}}, {"policy_logprobs", "reference_logprobs"}),
    ],
)
def test_grpo_reads_what_its_loss_needs(options: dict[str, Any], columns: set[str]) -> None:
    assert set(Grpo(PolicyConfig(**options)).columns) == {"advantages", "generation_logprobs"} | columns


# ---- correction for the generating engine ----


def draw_off_policy(seed: int, spread: float = 0.7) -> dict[str, Any]:
    """With an engine that disagrees, wildly so on the fourth row."""
    data = draw(seed)
    data["generation_logprobs"] = data["old_logprobs"] + spread * torch.randn(ROWS, LENGTH)
    data["generation_logprobs"][3] -= 1.0
    return data


def corrected(data: dict[str, Any], config: LossConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss token by token, and its sums."""
    loss = torch.zeros(())
    sums = dict.fromkeys(("count", "weight", "weight_squared", "truncated"), 0.0)
    masked = 0
    proximal = data["logprobs"].detach() if data["old_logprobs"] is None else data["old_logprobs"]
    for row in range(ROWS):
        places = [t for t in range(LENGTH) if data["token_mask"][row, t]]
        if data["sample_mask"][row] == 0:
            continue
        gaps = {t: (proximal[row, t] - data["generation_logprobs"][row, t]).item() for t in places}
        if config.max_sequence_logprob_error is not None:
            error = sum(abs(gap) for gap in gaps.values()) / len(gaps)
            if error > config.max_sequence_logprob_error:
                masked += 1
                continue
        logs = {"none": dict.fromkeys(places, 0.0), "token": gaps, "sequence": dict.fromkeys(places, sum(gaps.values()))}
        weights = {t: min(math.exp(log), config.importance_cap) for t, log in logs[config.importance_sampling].items()}
        for log, weight in [
            (logs[config.importance_sampling][t], weights[t]) for t in places[: 1 if config.importance_sampling == "sequence" else None]
        ]:
            for name, value in zip(sums, (1, weight, weight**2, log > math.log(config.importance_cap)), strict=True):
                sums[name] += value
        terms = []
        for t in places:
            ratio = torch.exp(data["logprobs"][row, t] - proximal[row, t])
            advantage = data["advantages"][row]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage)
            gap = data["reference_logprobs"][row, t] - data["logprobs"][row, t]
            terms.append(weights[t] * (config.kl_coef * (gap.exp() - gap - 1) - surrogate))
        if config.aggregation == "token_mean":
            loss = loss + torch.stack(terms).sum() / int(data["token_mask"].sum())
        else:
            loss = loss + torch.stack(terms).mean() / ROWS
    found = {f"importance/{name}": value for name, value in sums.items()} if config.importance_sampling != "none" else {}
    return loss, found | ({"masked_sequences": masked} if config.max_sequence_logprob_error is not None else {})


CORRECTIONS = [
    LossConfig(importance_sampling=how, importance_cap=cap, max_sequence_logprob_error=error, kl_coef=0.1, aggregation=aggregation)
    for how in ("none", "token", "sequence")
    for cap in (1.0, 2.0, 1e6)
    for error in (None, 0.6)
    for aggregation in ("token_mean", "sequence_mean")
    if how != "none" or (error is not None and cap == 2.0)
]


def name(config: LossConfig) -> str:
    masked = "masked" if config.max_sequence_logprob_error else "whole"
    return f"{config.importance_sampling}-{config.importance_cap:g}-{masked}-{config.aggregation}"


@pytest.mark.parametrize("config", CORRECTIONS, ids=name)
@pytest.mark.parametrize("recomputed", [True, False])
def test_corrections_equal_the_reference_with_their_gradient(config: LossConfig, recomputed: bool) -> None:
    data = draw_off_policy(6)
    if not recomputed:
        data["old_logprobs"] = None
    loss, sums = ours(data, config)
    expected, counts = corrected(data, config)
    assert 0 < counts.get("masked_sequences", 1) < 6  # some rows are left out, some stay
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, data["logprobs"])[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert {name: float(sums[name]) for name in sums.keys() - ALWAYS - KL} == pytest.approx(counts, rel=1e-4)


@pytest.mark.parametrize("config", CORRECTIONS, ids=name)
def test_corrections_split_over_micro_batches(config: LossConfig) -> None:
    data = draw_off_policy(7)
    whole, sums = ours(data, config)
    parts = [ours(data, config, rows) for rows in (slice(0, 2), slice(2, 4), slice(4, ROWS))]
    total = sum(part[0] for part in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(*(torch.autograd.grad(value, data["logprobs"])[0] for value in (total, whole)))
    for name, value in sums.items():
        together = whole_batch(name, [part[1][name] for part in parts])
        torch.testing.assert_close(together, value)


def test_nothing_is_corrected_by_default() -> None:
    data = draw_off_policy(8)
    config = LossConfig(kl_coef=0.2)
    agreeing = data | {"generation_logprobs": data["old_logprobs"]}
    (loss, sums), (expected, counted) = ours(data, config), ours(agreeing, config)
    assert torch.equal(loss, expected)
    assert torch.equal(*(torch.autograd.grad(value, data["logprobs"])[0] for value in (loss, expected)))
    assert counted.pop("logprob_error") == counted.pop("logprob_error/max") == 0
    assert counted.items() <= sums.items()
    assert set(sums) == ALWAYS | KL


@pytest.mark.parametrize("how", ["token", "sequence"])
def test_an_engine_that_agrees_changes_nothing(how: Any) -> None:
    data = draw(9)
    data["generation_logprobs"] = torch.where(data["token_mask"], data["old_logprobs"], 123.0)  # and padding may hold anything
    counted = data["token_mask"] * data["sample_mask"][:, None]
    loss, sums = ours(data, LossConfig(importance_sampling=how, max_sequence_logprob_error=1e-6))
    assert torch.equal(loss, ours(data, LossConfig())[0])
    units = counted.sum() if how == "token" else data["sample_mask"].sum()
    assert sums["importance/count"] == sums["importance/weight"] == sums["importance/weight_squared"] == units
    assert sums["importance/truncated"] == sums["masked_sequences"] == 0


def weighing(how: Any, cap: float, **options: Any) -> LossConfig:
    return LossConfig(importance_sampling=how, importance_cap=cap, **options)


def test_weights_by_hand() -> None:
    policy = torch.tensor([[0.0, -1.0, -2.0, -1.0], [-1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    engine = torch.tensor([[9.0, -1.5, -2.25, -9.0], [-1.0, -2.0, -1.0, 5.0]])
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 0]])
    weights, sums = importance_weights(policy, engine, mask, weighing("token", 2.0))
    torch.testing.assert_close(weights, torch.tensor([[0, math.exp(0.5), math.exp(0.25), 0], [0, 2, 1, 0]]))
    assert not weights.requires_grad
    assert (sums["importance/count"], sums["importance/truncated"]) == (4, 1)
    weights, sums = importance_weights(policy, engine, mask, weighing("sequence", 2.2))
    torch.testing.assert_close(weights, torch.tensor([[0, math.exp(0.75), math.exp(0.75), 0], [0, 2.2, 2.2, 0]]))
    assert (sums["importance/count"], sums["importance/truncated"]) == (2, 1)
    torch.testing.assert_close(sums["importance/weight_squared"], torch.tensor(math.exp(1.5) + 2.2**2))
    weights, sums = importance_weights(policy, engine, mask, weighing("geometric", 1.5))
    torch.testing.assert_close(weights, torch.tensor([[0, math.exp(0.375), math.exp(0.375), 0], [0, 1.5, 1.5, 0]]))
    assert (sums["importance/count"], sums["importance/truncated"]) == (2, 1)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token", [[0.0, 1.5, 0, 0.8], [0, 0, 1, 0]]),
        ("sequence", [[0.0, 0, 0, 0], [0, 0.6, 0.6, 0]]),
        ("geometric", [[0.0] * 4, [0.0] * 4]),
    ],
)
def test_weights_outside_the_bounds_are_left_out(how: str, expected: list[list[float]]) -> None:
    ratios = torch.tensor([[9.0, 1.5, 0.25, 0.8], [1.0, 0.6, 1.0, 7.0]])
    mask = torch.tensor([[0.0, 1, 1, 1], [0, 1, 1, 0]])
    floor = {"token": 0.7, "sequence": 0.5, "geometric": 0.8}[how]
    config = weighing(how, 2.0, importance_beyond="mask", importance_floor=floor)
    weights, sums = importance_weights(ratios.log(), torch.zeros(2, 4), mask, config)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert sums["importance/count"] == (mask.sum() if how == "token" else 2)
    assert sums["importance/truncated"] == {"token": 2, "sequence": 1, "geometric": 2}[how]
    assert sums["importance/weight_squared"] == pytest.approx(
        float((torch.tensor(expected).max(1).values ** 2).sum()) if how != "token" else 1.5**2 + 0.8**2 + 1
    )


@pytest.mark.parametrize("how", ["token", "sequence"])
def test_tokens_that_the_engine_or_the_policy_held_for_impossible(how: Any) -> None:
    for policy, engine, weight in ((-1.0, -math.inf, 2.0), (-math.inf, -1.0, 0.0), (-1.0, -500.0, 2.0)):
        weights, sums = importance_weights(torch.tensor([[policy]]), torch.tensor([[engine]]), torch.ones(1, 1), weighing(how, 2.0))
        assert (weights.item(), sums["importance/truncated"].item()) == (weight, float(weight == 2.0))


def test_the_mean_error_decides_over_a_sequence() -> None:
    policy, engine = torch.zeros(3, 4), torch.tensor([[0.5, -0.5, 0.5, 99.0], [0.0, 0.0, 1.2, 99.0], [0.6, -0.6, 0.6, 0.0]])
    mask = torch.tensor([[1.0, 1, 1, 0]] * 3)
    assert sequence_mask(policy, engine, mask, largest=0.5).tolist() == [1, 1, 0]
    assert sequence_mask(policy, engine, torch.zeros(3, 4), largest=0.5).tolist() == [1, 1, 1]


def test_truncation_only_lowers_weights_and_raises_the_effective_sample_size() -> None:
    data = draw_off_policy(10)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    for how in ("token", "sequence"):
        sizes = []
        for cap in (1e9, 3.0, 1.5, 1.0):
            weights, sums = importance_weights(data["old_logprobs"], data["generation_logprobs"], mask, weighing(how, cap))
            assert weights.max() <= cap
            sizes.append(sums["importance/weight"] ** 2 / sums["importance/weight_squared"])
            assert sizes[-1] <= sums["importance/count"] + 1e-3
        assert sizes == sorted(sizes)


def test_what_a_step_reports_of_its_corrections() -> None:
    nothing = dict.fromkeys(CORRECTION_SUMS, 0.0)
    config = LossConfig(importance_sampling="token", max_sequence_logprob_error=0.6)
    data = draw_off_policy(11)
    _, sums = ours(data, config)
    assert set(CORRECTION_SUMS) == set(sums) - ALWAYS
    kept = data["token_mask"] * data["sample_mask"][:, None]
    kept = kept * sequence_mask(data["old_logprobs"], data["generation_logprobs"], kept, 0.6)[:, None] > 0
    weights = (data["old_logprobs"] - data["generation_logprobs"]).exp().clamp(max=2.0)[kept]
    assert correction_metrics({name: float(value) for name, value in sums.items()}, config) == pytest.approx(
        {
            "importance/weight": float(weights.mean()),
            "importance/truncated_fraction": float((weights == 2.0).float().mean()),
            "importance/effective_sample_fraction": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
            "masked_sequences": 6 - int(kept.any(dim=1).sum()),
        }
    )
    assert correction_metrics(nothing, LossConfig()) == {}
    assert correction_metrics(nothing, LossConfig(importance_sampling="sequence"))["importance/truncated_fraction"] == 0  # all were masked


def test_corrections_that_make_no_sense_are_refused() -> None:
    for wrong in ({"importance_cap": 0.5}, {"importance_cap": math.inf}, {"max_sequence_logprob_error": 0}):
        with pytest.raises(ValidationError):
            LossConfig(**wrong)


def test_sft_loss() -> None:
    data = draw(5)
    loss, _ = loss_of(Sft(PolicyConfig()), batch_of(data), data["logprobs"])
    torch.testing.assert_close(loss, reference.sft(list(data["logprobs"]), data))


@pytest.mark.parametrize("old", [None, torch.tensor([[0.0, -1.25, -2.0]])])
def test_logprob_error(old: torch.Tensor | None) -> None:
    """Of the weights that generated: the old ones, where there are such."""
    logprobs, mask = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[False, True, True]])
    columns = {"advantages": torch.ones(1, 3), "generation_logprobs": torch.tensor([[-9.0, -1.5, -2.25]])}
    if old is not None:
        columns["policy_logprobs"] = old
    objective = Grpo(PolicyConfig(recompute_logprobs="auto" if old is None else "always"))
    _, sums = loss_of(objective, micro_batch(mask, torch.ones(1), columns, tokens=2, sequences=1), logprobs)
    assert (sums["logprob_error"], sums["logprob_error/max"]) == ((0.75, 0.5) if old is None else (0.5, 0.25))


def test_a_token_that_has_become_improbable_does_not_rule_the_step() -> None:
    data = draw()
    data["logprobs"] = torch.full_like(data["logprobs"], -20.0, requires_grad=True)
    data["old_logprobs"] = None
    data["reference_logprobs"] = data["generation_logprobs"] = torch.full_like(data["reference_logprobs"], -1.0)
    data["advantages"] = torch.zeros_like(data["advantages"])
    largest = {}
    for how in ("none", "token"):
        loss, sums = ours(data, LossConfig(kl_coef=1.0, importance_sampling=how))
        (gradient,) = torch.autograd.grad(loss, data["logprobs"])
        largest[how] = float(gradient.abs().max() * data["token_mask"].sum())
        assert float(sums["kl"]) == pytest.approx(float(loss.detach() * data["token_mask"].sum()), rel=1e-4)
    assert largest["none"] == pytest.approx(math.exp(19), rel=1e-3)
    assert largest["token"] == pytest.approx(1.0, rel=1e-3)  # policy / engine x reference / policy
