"""Weight columns change no bit: of the losses written out (formulas.py), and where objectives share one computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.policy.batch import MicroBatch
from actors.policy.objectives.base import Objective
from actors.policy.objectives.sft import Sft
from configs.loss import LossConfig
from configs.policy import PolicyConfig
from tests.actors.policy.objectives import formulas
from tests.actors.policy.objectives.test_components import CORRECTIONS, LENGTH, ROWS, batch_of, draw_off_policy, grpo, name

CONFIGS = [*CORRECTIONS, LossConfig(), LossConfig(kl_coef=0.3), LossConfig(kl_coef=0.001, aggregation="sequence_mean")]


def draw(*, recomputed: bool) -> dict[str, Any]:
    data = draw_off_policy(12)
    return data if recomputed else data | {"old_logprobs": None}


def totals(data: dict[str, Any]) -> dict[str, int]:
    return {"global_tokens": int(data["token_mask"].sum()), "global_sequences": ROWS}


def run(objective: Objective, b: MicroBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient, and all that is reported."""
    loss, report = objective.loss(b, logprobs, torch.ones_like(logprobs))
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], {name: float(value) for name, value in report.items()}


def only(objective: Objective, b: MicroBatch) -> MicroBatch:
    """With the columns of this objective."""
    columns = {name: b.columns[name] for name in objective.columns}
    return MicroBatch(**(vars(b) | {"columns": columns | objective.weights(b)}))


def together(objective: Objective, b: MicroBatch, *others: Objective) -> MicroBatch:
    """And of the others, 0 everywhere."""
    b = only(objective, b)
    names = {name for other in others for name in (*other.columns, *other.components)} - set(b.columns)
    return b.with_columns(dict.fromkeys(names, torch.zeros(ROWS, LENGTH)))


@pytest.mark.parametrize("config", CONFIGS, ids=name)
@pytest.mark.parametrize("recomputed", [True, False])
def test_grpo_is_the_formula_bit_for_bit(config: LossConfig, recomputed: bool) -> None:
    data = draw(recomputed=recomputed)
    reference = data["reference_logprobs"] if config.kl_coef else None
    expected, sums, largest = formulas.grpo_loss(**(data | {"reference_logprobs": reference}), config=config, **totals(data))
    objective = grpo(data, config)
    loss, gradient, reported = run(objective, only(objective, batch_of(data)), data["logprobs"])
    assert torch.equal(loss, expected.detach())
    assert torch.equal(gradient, torch.autograd.grad(expected, data["logprobs"])[0])
    assert {name: reported.get(name, 0.0) for name in sums} == {name: float(value) for name, value in sums.items()}
    assert reported["ratio/max"] == largest["ratio"]


def test_sft_is_the_formula_bit_for_bit() -> None:
    data, objective = draw(recomputed=True), Sft(PolicyConfig())
    tokens = totals(data)["global_tokens"]
    expected, _ = formulas.sft_loss(data["logprobs"], data["token_mask"], data["sample_mask"], global_tokens=tokens)
    loss, gradient, _ = run(objective, only(objective, batch_of(data)), data["logprobs"])
    assert torch.equal(loss, expected.detach())
    assert torch.equal(gradient, torch.autograd.grad(expected, data["logprobs"])[0])


@pytest.mark.parametrize("config", CONFIGS, ids=name)
@pytest.mark.parametrize("recomputed", [True, False])
def test_columns_of_another_objective_change_no_bit(config: LossConfig, recomputed: bool) -> None:
    data = draw(recomputed=recomputed)
    improbable = (200 * data["logprobs"].detach()).requires_grad_()  # exp() of most of them is no float32
    rollouts, supervised = grpo(data, config), Sft(PolicyConfig(loss=config))
    for objective, logprobs in ((rollouts, data["logprobs"]), (supervised, improbable)):
        alone = run(objective, only(objective, batch_of(data)), logprobs)
        shared = run(objective, together(objective, batch_of(data), rollouts, supervised), logprobs)
        assert torch.equal(shared[0], alone[0])
        assert torch.equal(shared[1], alone[1])
        assert shared[2].items() >= alone[2].items()
        assert not any(value for name, value in shared[2].items() if name not in alone[2])


def test_objectives_of_one_aggregation_are_one_computation() -> None:
    data = draw(recomputed=True)
    supervised = Sft(PolicyConfig())
    assert grpo(data, LossConfig(kl_coef=0.1)).computation == supervised.computation
    assert grpo(data, LossConfig(aggregation="sequence_mean")).computation != supervised.computation
    rollouts = grpo(data, LossConfig(kl_coef=0.1))
    one, other = (together(objective, batch_of(data), rollouts, supervised) for objective in (rollouts, supervised))
    assert one.tensors().keys() == other.tensors().keys()


def test_an_objective_with_a_loss_of_its_own_shares_no_graph() -> None:
    class Own(Sft):
        def loss(self, b: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
            return super().loss(b, logprobs**2, entropies)

    assert Own(PolicyConfig()).computation != Sft(PolicyConfig()).computation
