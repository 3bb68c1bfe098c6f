"""Three optimizer steps: against transformers with torch.optim.AdamW, and the same in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.policy import reference, tiny
from tests.actors.policy.conftest import GRPO, LAYOUTS, OPTIMIZER
from tests.actors.policy.test_parity import stored

TEMPERATURE = 0.8  # of the rollouts, and so of GRPO; supervised steps have none


def hf_training(path: Path, objective: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The job of conftest's `_training`, without Megatron."""
    model = reference.load(str(path))
    _, columns = tiny.batch(5, 97)
    optimizer = reference.adamw(model, **OPTIMIZER)

    def all_logprobs() -> list[torch.Tensor]:
        return [reference.logprobs(model, ids, 1.0 if objective == "sft" else TEMPERATURE) for ids in columns["input_ids"]]

    old = [row.detach() for row in all_logprobs()]
    loss_options = GRPO["loss"]
    history = []
    for _ in range(3):
        rows = all_logprobs()
        if objective == "sft":
            loss = reference.sft(rows, columns)
        else:
            loss = reference.grpo(
                rows, old, old, columns, low=loss_options["clip_low"], high=loss_options["clip_high"], kl_coef=loss_options["kl_coef"]
            )
        optimizer.zero_grad()
        loss.backward()
        limit = GRPO["optimizer"]["clip_grad"] if objective == "grpo" else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item()})
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, history


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(("job", "model"), [("sft", "qwen2-untied"), ("grpo", "qwen3-tied")])
def test_three_steps_equal_transformers_with_torch_adamw(results: Any, models: dict[str, Path], job: str, model: str) -> None:
    ours = results("TP1")[job][0]
    weights, history = hf_training(models[model], job)
    assert_same_weights(ours["weights"], weights)
    assert not torch.equal(ours["weights"]["model.norm.weight"], stored(models[model])["model.norm.weight"])
    for mine, theirs in zip(ours["metrics"], history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert mine["lr"] == OPTIMIZER["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "grpo", "corrected", "mixture", "distilled", "dpo"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "TP1"])
def test_a_layout_changes_nothing(results: Any, layout: str, job: str) -> None:
    one, many = results("TP1")[job][0], results(layout)[job]
    assert_same_weights(many[0]["weights"], one["weights"])
    for step, expected in enumerate(one["metrics"]):
        for rank in many:
            assert rank["metrics"][step] == many[0]["metrics"][step]  # the same numbers on every rank
        assert many[0]["metrics"][step] == pytest.approx(expected, abs=2e-4, rel=2e-4)


@pytest.mark.slow
def test_micro_batches_change_nothing(results: Any) -> None:
    small, whole = results("TP1")["grpo"][0], results("TP1")["one-micro-batch"][0]
    assert_same_weights(small["weights"], whole["weights"])
    assert small["metrics"][2] == pytest.approx(whole["metrics"][2], abs=2e-4, rel=2e-4)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(results: Any) -> None:
    first, second = results("TP1")["grpo"][0], results("TP1")["grpo-again"][0]
    assert first["metrics"] == second["metrics"]
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("cold", "warmed"), [("sft", "sft-warmed"), ("bfloat16-cold", "bfloat16-warmed")])
def test_warming_up_changes_nothing(cold: Any, warmed: Any, results: Any) -> None:
    cold, warmed = results("TP1")[cold][0], results("TP1")[warmed][0]
    assert warmed["metrics"] == cold["metrics"]
    for name, tensor in cold["weights"].items():
        assert torch.equal(tensor, warmed["weights"][name]), name


@pytest.mark.slow
def test_metrics_of_a_grpo_step(results: Any) -> None:
    first, _, last = results("TP1")["grpo"][0]["metrics"]
    assert first["kl"] == 0  # the policy is still the reference
    assert first["clip_fraction"] == 0
    assert first["ratio"] == pytest.approx(1)
    assert last["kl"] > 0
    assert last["clip_fraction"] > 0
    assert last["ratio/max"] > 1.03
    _, columns = tiny.batch(5, 97)
    counted = zip(columns["token_mask"], columns["sample_mask"], strict=True)
    assert first["response_tokens"] == sum(int(mask.sum()) for mask, weight in counted if weight)
    assert 0 < first["logprob_error/mean"] < first["logprob_error/max"]
    assert 0 < first["entropy"] < torch.tensor(97.0).log()


@pytest.mark.slow
def test_metrics_of_a_corrected_step(results: Any) -> None:
    """Truncated importance weights and masked sequences, recomputed from the two columns of log-probabilities."""
    found = results("TP1")["corrected"][0]
    (metrics,) = found["metrics"]
    _, columns = tiny.batch(5, 97)
    weights, masked = [], 0
    for row, policy in enumerate(found["policy_logprobs"][f"k{row}"] for row in range(6)):
        mask, generated = columns["token_mask"][row], columns["generation_logprobs"][row]
        if not columns["sample_mask"][row]:
            continue
        if (policy - generated)[mask].abs().mean() > 3.5:
            masked += 1
            continue
        weights.append((policy - generated)[mask].exp())
    raw = torch.cat(weights)
    cut = raw.clamp(max=2.0)
    assert 0 < masked < 5
    assert metrics["masked_sequences"] == masked
    assert metrics["importance/weight"] == pytest.approx(float(cut.mean()), rel=1e-4)
    assert metrics["importance/truncated_fraction"] == pytest.approx(float((raw > 2.0).float().mean()), abs=1e-6)
    assert metrics["importance/effective_sample_fraction"] == pytest.approx(float(cut.sum() ** 2 / (cut**2).sum() / len(cut)), rel=1e-4)


@pytest.mark.slow
def test_reference_weights_are_swapped_in_and_out(results: Any) -> None:
    moved, start = results("TP1")["moved"][0], results("TP1")["llama-untied"][0]
    before, now = start["policy_logprobs"], moved["policy_logprobs"]
    for key, reference_row in moved["reference_logprobs"].items():
        assert torch.equal(reference_row, before[key])  # the snapshot's weights
        assert not torch.equal(now[key], before[key])  # the trained weights are back


@pytest.mark.slow
def test_reset_optimizer_starts_the_schedule_again_and_a_lowered_rate_stays_below_it(results: Any) -> None:
    rates = [step["lr"] for step in results("TP1")["reset"][0]["metrics"]]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-3 / 3, 5e-3 * 2 / 3, 5e-3, 5e-3, 5e-3 / 2])  # halved


@pytest.mark.slow
@pytest.mark.parametrize("job", ["reset", "masters-reset", "reset-distributed", "reset-by-chance"])
def test_a_replaced_optimizer_leaves_no_tensor(results: Any, job: str) -> None:
    """No collection would find them: they are frozen."""
    freed = results("TP1")[job][0]["freed"]
    assert len(freed) > 20
    assert all(freed)


@pytest.mark.slow
def test_missing_columns_are_named(results: Any) -> None:
    error = results("TP1")["missing"][0]["error"]
    assert "MissingColumnsError" in error
    assert "policy_logprobs not written yet" in error
    assert "generation_logprobs" in error  # what there is


@pytest.mark.slow
def test_a_nan_on_one_rank_stops_every_rank_before_the_update(results: Any, models: dict[str, Path]) -> None:
    ranks = results("DP2")["poison"]
    assert all("FloatingPointError" in rank["error"] and "no update was made" in rank["error"] for rank in ranks)
    for name, tensor in stored(models["llama-untied"]).items():
        assert torch.equal(ranks[0]["weights"][name], tensor)


@pytest.mark.slow
def test_bfloat16_trains_on_a_cpu(results: Any, models: dict[str, Path]) -> None:
    result = results("TP1")["bfloat16"][0]
    first, second = result["metrics"]
    assert second["loss"] < first["loss"]
    exact = results("TP1")["llama-untied"][0]["policy_logprobs"]
    for key, row in result["policy_logprobs"].items():
        torch.testing.assert_close(row, exact[key], atol=0.3, rtol=0.05)
    source = stored(models["llama-untied"])
    assert all(tensor.dtype == torch.bfloat16 and tensor.shape == source[name].shape for name, tensor in result["weights"].items())


@pytest.mark.slow
def test_a_dead_peer_is_an_error_that_says_so(results: Any) -> None:
    error = results("TP2")["vanish"][0]["error"]
    assert "PeerLostError('train: policy worker 0 of 2 lost contact with another" in error


def test_a_step_beyond_a_limit_changes_nothing(results: Any) -> None:
    """Weights, moments and schedule go on as if it had not been; the same on every rank."""
    (guarded,), (plain,) = results("TP1")["sft-guarded"], results("TP1")["sft"]
    made = [metrics for metrics in guarded["metrics"] if "guard/grad_norm" not in metrics]
    assert made == plain["metrics"]
    stopped = [metrics for metrics in guarded["metrics"] if "guard/grad_norm" in metrics]
    assert [(m["guard/grad_norm"], m["guard/entropy"], m["guard/non_finite"]) for m in stopped] == [(1.0, 0.0, 0.0)] * 2
    for name, tensor in plain["weights"].items():
        assert torch.equal(guarded["weights"][name], tensor), name
