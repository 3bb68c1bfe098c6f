"""An engine says what transformers says: tokens and log-probabilities, before and after a refit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import ray
import torch
from transformers import PreTrainedModel

from actors.generation.pool import EnginePool
from actors.generation.types import GenerationResult, GenerationTimeoutError, PromptTooLongError, RequestError, UpdateOptions
from actors.refit.manifest import WeightMismatchError
from tests.actors.generation.conftest import CONTEXT, EOS, NAMESPACE, PROMPTS, RunningEngine, request, weights_of
from tests.patience import WAIT_S

Weights = dict[str, torch.Tensor]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int = 12) -> list[int]:
    tokens = list(prompt)
    for _ in range(min(max_new_tokens, CONTEXT - len(prompt))):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in EOS:
            break
    return tokens[len(prompt) :]


@torch.no_grad()
def scaled_logits(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits / temperature


def logprobs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    table = scaled_logits(model, prompt, response, temperature).log_softmax(-1)
    return table.gather(1, torch.tensor(response)[:, None])[:, 0]


def answers(engine: RunningEngine) -> list[list[int]]:
    return [r.token_ids for r in engine.generate([request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])]


def test_greedy_equals_transformers(engine: RunningEngine) -> None:
    model = engine.model(0)
    assert [result.token_ids for result in engine.initial] == [greedy(model, prompt) for prompt in PROMPTS]
    assert {(r.weight_version_start, r.weight_segments[-1][0]) for r in engine.initial} == {(0, 0)}


def test_greedy_equals_transformers_after_refits(engine: RunningEngine) -> None:
    seen = [[r.token_ids for r in engine.initial]]
    for seed, version in ((5, 7), (6, 8)):
        model = engine.refit(seed, version)
        got = engine.generate([request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
        assert [r.token_ids for r in got] == [greedy(model, prompt) for prompt in PROMPTS]
        assert {r.weight_version_start for r in got} == {r.weight_segments[-1][0] for r in got} == {version}
        seen.append([r.token_ids for r in got])
    assert seen[0] != seen[1] != seen[2]
    engine.refit(0, 9)
    assert answers(engine) == seen[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(engine: RunningEngine, temperature: float) -> None:
    model = engine.refit(3, 3)
    requests = [request(f"{i}/{g}", p, temperature=temperature, seed=100 * i + g) for i, p in enumerate(PROMPTS) for g in range(4)]
    worst = 0.0
    for asked, result in zip(requests, engine.generate(requests), strict=True):
        expected = logprobs(model, asked.prompt_token_ids, result.token_ids, temperature)
        worst = max(worst, float((torch.tensor(result.logprobs) - expected).abs().max()))
    print(f"largest log-probability difference at temperature {temperature}: {worst:.2e}")
    assert worst < 1e-3


def test_top_p_renormalises(engine: RunningEngine) -> None:
    model = engine.refit(3, 3)
    asked = request("a", PROMPTS[1], temperature=1.0, top_p=0.6, seed=1)
    result = engine.generate([asked])[0]
    probabilities = scaled_logits(model, asked.prompt_token_ids, result.token_ids, 1.0).softmax(-1)
    for row, token, logprob in zip(probabilities, result.token_ids, result.logprobs, strict=True):
        ordered = row.sort(descending=True).values
        nucleus = ordered[: int((ordered.cumsum(0) < 0.6).sum()) + 1].sum()
        assert logprob == pytest.approx(float((row[token] / nucleus).log()), abs=1e-3)


def test_sampling_follows_the_seed_of_each_request(engine: RunningEngine) -> None:
    engine.refit(3, 3)
    requests = [request(str(g), PROMPTS[0], temperature=1.0, seed=g) for g in range(12)]
    first, second = engine.generate(requests), engine.generate(requests)
    if engine.executor == "in_process":
        assert first == second
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert len({tuple(r.token_ids) for r in first}) > 6
    other = engine.generate([replace(r, seed=r.seed + 1000) for r in requests])
    assert [r.token_ids for r in other] != [r.token_ids for r in first]
    alone = engine.generate(requests[5:6])[0]
    assert alone.token_ids == first[5].token_ids


def test_eos_ends_a_response_and_belongs_to_it(engine: RunningEngine) -> None:
    engine.refit(3, 3)
    results = engine.generate([request(str(g), PROMPTS[0], temperature=1.0, seed=g) for g in range(24)])
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert 0 < len(stopped) < len(results)
    for result in results:
        assert len(result.logprobs) == len(result.token_ids) <= 12
        assert (result.token_ids[-1] in EOS) == (result.finish_reason == "stop") or len(result.token_ids) == 12
        assert not set(result.token_ids[:-1]) & set(EOS)


def test_results_come_in_the_order_of_the_requests(engine: RunningEngine) -> None:
    requests = [request(str(i), PROMPTS[i % 4], max_new_tokens=1 + i % 5, temperature=1.0, seed=i) for i in range(20)]
    assert [r.request_id for r in engine.generate(requests)] == [r.request_id for r in requests]
    assert engine.generate([]) == []


def test_the_context_ends_a_response(engine: RunningEngine) -> None:
    results: list[GenerationResult] = engine.generate([request(str(g), [9] * (CONTEXT - 3), temperature=1.0, seed=g) for g in range(8)])
    assert max(len(r.token_ids) for r in results) == 3
    assert {r.finish_reason for r in results if r.token_ids[-1] not in EOS} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([9] * CONTEXT, PromptTooLongError, f"request 'bad'.*{CONTEXT} tokens.*max_model_len = {CONTEXT}"),
        ([], RequestError, "request 'bad': the prompt is empty"),
        ([5, 128], RequestError, "request 'bad': token id 128 .*vocabulary of 128"),
        ([-1], RequestError, "token id -1"),
    ],
)
def test_bad_requests_are_refused_by_name(engine: RunningEngine, prompt: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.generate([request("good", PROMPTS[0]), request("bad", prompt)])
    assert engine.generate([request("good", PROMPTS[0])])[0].request_id == "good"


def test_a_request_id_twice_is_refused(engine: RunningEngine) -> None:
    with pytest.raises(RequestError, match="'x' occurs twice"):
        ray.get(engine.handle.submit.remote("client", [request("x", PROMPTS[0]), request("x", PROMPTS[1])]), timeout=WAIT_S)


def test_a_missed_deadline_aborts_and_leaves_the_engine_usable(engine: RunningEngine) -> None:
    before = answers(engine)
    with pytest.raises(GenerationTimeoutError, match="8 of 8 responses"):
        EnginePool(NAMESPACE, [engine.name], timeout_s=0.0).generate(
            [request(str(g), [9], temperature=1.0, max_new_tokens=40) for g in range(8)]
        )
    assert answers(engine) == before
    assert ray.get(engine.handle.health.remote(), timeout=WAIT_S).running_requests == 0


def _without(weights: Weights) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def _with_unknown(weights: Weights) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)


def _misshapen(weights: Weights) -> None:
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64)


def _integers(weights: Weights) -> None:
    weights["model.norm.weight"] = torch.zeros(64, dtype=torch.int64)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (_without, "model.layers.1.mlp.up_proj.weight"),
        (_with_unknown, "model.layers.2.mlp.up_proj.weight"),
        (_misshapen, "model.layers.0.self_attn.q_proj.weight"),
        (_integers, "model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_leave_the_engine_as_it_was(engine: RunningEngine, spoil: Callable[[Weights], None], name: str) -> None:
    model = engine.refit(4, 4)
    weights = weights_of(engine.model(5))
    spoil(weights)
    with pytest.raises(WeightMismatchError, match=name):
        ray.get(engine.handle.update_weights.remote(weights, 5, UpdateOptions()), timeout=WAIT_S)
    assert answers(engine) == [greedy(model, prompt) for prompt in PROMPTS]
    health = ray.get(engine.handle.health.remote(), timeout=WAIT_S)
    assert (health.state, health.weight_version, health.running_requests, health.failure) == ("ready", 4, 0, "")


def test_a_tied_lm_head_may_be_sent_too(engine: RunningEngine) -> None:
    model = engine.model(2)
    weights = weights_of(model) | {"lm_head.weight": model.get_output_embeddings().weight.detach()}
    taken = ray.get(engine.handle.update_weights.remote(weights, 2, UpdateOptions()), timeout=WAIT_S)
    assert taken.bytes == sum(p.numel() * 4 for p in model.parameters())
    assert answers(engine) == [greedy(model, prompt) for prompt in PROMPTS]


def test_bfloat16_weights_are_cast(engine: RunningEngine) -> None:
    model = engine.model(2).bfloat16()
    ray.get(engine.handle.update_weights.remote(weights_of(model), 2, UpdateOptions()), timeout=WAIT_S)
    model = model.float()
    assert answers(engine) == [greedy(model, prompt) for prompt in PROMPTS]
