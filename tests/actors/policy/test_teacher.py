"""A teacher of another family and size as the reference: its log-probabilities, and steps of on-policy distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.policy import reference, tiny
from tests.actors.policy.conftest import GRPO, LAYOUTS, OPTIMIZER
from tests.actors.policy.program import COLUMNS
from tests.actors.policy.test_training import TEMPERATURE, assert_same_weights


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_teacher_s_log_probabilities_are_those_of_transformers(results: Any, models: dict[str, Path], layout: str) -> None:
    found = results(layout)["distilled"][0]
    teacher, (_, columns) = reference.load(str(models["teacher"])), tiny.batch(5, 97)
    with torch.no_grad():
        for row, (ids, mask) in enumerate(zip(columns["input_ids"], columns["token_mask"], strict=True)):
            expected = reference.logprobs(teacher, ids, TEMPERATURE) * mask
            torch.testing.assert_close(found["reference_logprobs"][f"k{row}"], expected, atol=1e-5, rtol=1e-5)
    own = results("TP1")["grpo"][0]["policy_logprobs"]  # of the weights before the first step
    for key, values in found["policy_logprobs"].items():
        torch.testing.assert_close(values, own[key], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_step_is_the_policy_gradient_of_the_reverse_kl(results: Any, models: dict[str, Path]) -> None:
    """Thinking Machines, "On-policy distillation" (2025): advantages log teacher - log student, token by token, no discount."""
    ours = results("TP1")["distilled"][0]
    student, teacher = reference.load(str(models["qwen3-tied"])), reference.load(str(models["teacher"]))
    _, columns = tiny.batch(5, 97)
    optimizer = reference.adamw(student, **OPTIMIZER)
    terms, gaps, tokens = [], [], 0
    for ids, mask, weight in zip(columns["input_ids"], columns["token_mask"], columns["sample_mask"], strict=True):
        log, taught = (reference.logprobs(model, ids, TEMPERATURE)[mask] for model in (student, teacher))
        advantages = (taught - log).detach()
        terms.append(-(torch.exp(log - log.detach()) * advantages).sum() * weight)
        gaps.append(advantages[weight > 0])
        tokens += int(mask.sum())
    gap = torch.cat([gap.flatten() for gap in gaps])
    loss = torch.stack(terms).sum() / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), GRPO["optimizer"]["clip_grad"])
    optimizer.step()
    (metrics,) = ours["metrics"]
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["kl"] == pytest.approx(float((gap.exp() - gap - 1).mean()), rel=1e-4)  # the estimate k3 of the same KL
    assert_same_weights(ours["weights"], {name: tensor.detach() for name, tensor in student.state_dict().items()})


def _distributions(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] log-probabilities of what may come in each place; the first place has none."""
    logits = model(ids[None]).logits[0, :-1].float() / TEMPERATURE
    return torch.nn.functional.pad(logits.log_softmax(-1), (0, 0, 1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_candidates_are_the_tokens_that_the_teacher_holds_most_probable(results: Any, models: dict[str, Path], layout: str) -> None:
    found = results(layout)["distilled-top"][0]
    teacher, (_, columns) = reference.load(str(models["teacher"])), tiny.batch(5, 97)
    with torch.no_grad():
        for row, (ids, mask) in enumerate(zip(columns["input_ids"], columns["token_mask"], strict=True)):
            expected = _distributions(teacher, ids).topk(5)
            ours = [found[column][f"k{row}"] for column in ("teacher_ids", "teacher_logprobs")]
            assert torch.equal(ours[0][mask].long(), expected.indices[mask])
            torch.testing.assert_close(ours[1][mask], expected.values[mask], atol=1e-5, rtol=1e-5)
            assert not any(column[~mask].any() for column in ours)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "TP2xPP2"])
@pytest.mark.parametrize("job", ["two-taught", "one-taught"])
def test_each_source_is_taught_by_its_own_teacher(results: Any, models: dict[str, Path], job: str, layout: str) -> None:
    found = results(layout)[job][0]
    teachers = {"b": reference.load(str(models["qwen2-untied"]))}
    teachers |= {"a": reference.load(str(models["teacher"]))} if job == "two-taught" else {}
    meta, columns = tiny.batch(5, 97)
    with torch.no_grad():
        for key, tag, ids, mask in zip(meta.keys, meta.tags, columns["input_ids"], columns["token_mask"], strict=True):
            if tag["source"] not in teachers:
                assert not any(found[column][key].any() for column in COLUMNS["candidates"])
                continue
            distributions = _distributions(teachers[tag["source"]], ids)
            expected = distributions.topk(5)
            assert torch.equal(found["teacher_ids"][key][mask].long(), expected.indices[mask])
            torch.testing.assert_close(found["teacher_logprobs"][key][mask], expected.values[mask], atol=1e-5, rtol=1e-5)
            chosen = distributions.gather(-1, ids[:, None])[:, 0] * mask
            torch.testing.assert_close(found["reference_logprobs"][key], chosen, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_step_with_two_teachers_is_the_same_in_every_layout(results: Any) -> None:
    expected = results("TP1")["two-taught"][0]
    assert expected["metrics"][0]["kl"] > 0
    for layout in ("TP2", "PP2", "DP2"):
        found = results(layout)["two-taught"][0]
        assert found["metrics"][0]["loss"] == pytest.approx(expected["metrics"][0]["loss"], rel=1e-4)
        assert_same_weights(found["weights"], expected["weights"])


@pytest.mark.slow
@pytest.mark.parametrize(("job", "layout"), [("top", "TP1"), ("full", "TP1"), ("full", "TP2")])
def test_steps_follow_the_exact_reverse_kl(results: Any, models: dict[str, Path], job: str, layout: str) -> None:
    """GKD (arXiv 2306.13649) on the student's own samples: KL(student || teacher) at every token; here its formula in two lines."""
    ours = results(layout)[f"distilled-{job}"][0]
    student, teacher = reference.load(str(models["qwen3-tied"])), reference.load(str(models["teacher"]))
    _, columns = tiny.batch(5, 97)
    optimizer = reference.adamw(student, **OPTIMIZER)
    tokens = sum(int(mask.sum()) for mask in columns["token_mask"])
    for metrics in ours["metrics"]:
        terms = []
        for ids, mask, weight in zip(columns["input_ids"], columns["token_mask"], columns["sample_mask"], strict=True):
            p, q = (_distributions(model, ids)[mask].exp() for model in (student, teacher))
            if job == "top":
                chosen = q.topk(5).indices
                p, q = (torch.cat((one.gather(-1, chosen), 1 - one.gather(-1, chosen).sum(-1, keepdim=True)), -1) for one in (p, q))
            terms.append((p * (p / q.detach()).log()).sum() * weight)
        loss = torch.stack(terms).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), GRPO["optimizer"]["clip_grad"])
        optimizer.step()
        assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
        counted = sum(int(mask.sum()) for mask, weight in zip(columns["token_mask"], columns["sample_mask"], strict=True) if weight)
        assert metrics["kl"] == pytest.approx(float(loss) * tokens / counted, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert_same_weights(ours["weights"], {name: tensor.detach() for name, tensor in student.state_dict().items()})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_what_is_distilled(results: Any, layout: str) -> None:
    expected, found = results("TP1")["distilled-top"][0], results(layout)
    for job in ("distilled-top", "distilled-dynamic", "distilled-packed"):
        for step, metrics in enumerate(found[job][0]["metrics"] if job in found else ()):
            for name in ("loss", "kl", "grad_norm", "entropy"):
                assert metrics[name] == pytest.approx(expected["metrics"][step][name], rel=1e-4), (job, step, name)
        assert job not in found or assert_same_weights(found[job][0]["weights"], expected["weights"]) is None
