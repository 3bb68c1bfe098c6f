"""Weights that change under running requests: no request is lost, and every token is that of the weights it is said to come from.

The reference is transformers, with the same weights: the whole text again under the version of each token where the KV cache was
recomputed, and a cache that the old model filled and the new model goes on with where it was not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from transformers import DynamicCache, PreTrainedModel

from actors.generation.engine import Engine
from actors.generation.types import GenerationRequest, GenerationResult, RequestError, UpdateMode, UpdateOptions, WeightUpdate
from actors.refit.manifest import WeightMismatchError
from configs.rollout import GenerationConfig
from tests.actors.generation.conftest import CONTEXT, EOS, PROMPTS, RunningEngine, request, weights_of
from tests.patience import WAIT_S

GENERATIONS = 200
_versions = itertools.count(1000)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=WAIT_S)


def collect(engine: RunningEngine, client: str, count: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    deadline = time.monotonic() + WAIT_S
    while len(results) < count and time.monotonic() < deadline:
        results += get(engine.handle.collect.remote(client, 1.0))
    return results


class Updates:
    """Two sets of weights that take turns, and which model a version stands for."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._choices = [(model, ray.put(weights_of(model))) for model in (engine.model(3), engine.model(4))]
        self.models: dict[int, PreTrainedModel] = {}
        self.pauses: list[float] = []

    def next(self, mode: UpdateMode = "in_flight", recompute: bool = True) -> int:
        version = next(_versions)
        model, weights = self._choices[version % 2]
        update: WeightUpdate = get(self._engine.handle.update_weights.remote(weights, version, UpdateOptions(mode, recompute)))
        self.models[version] = model
        self.pauses.append(update.pause_s)
        return version


def many(count: int, **changes: Any) -> list[GenerationRequest]:
    return [
        request(str(i), PROMPTS[i % 3], **({"temperature": 1.0, "seed": i, "max_new_tokens": 4 + i % 37} | changes)) for i in range(count)
    ]


def under_updates(
    engine: RunningEngine,
    requests: list[GenerationRequest],
    update: Callable[[], object],
    met: Callable[[GenerationResult], bool],
    wanted: int,
) -> list[GenerationResult]:
    """Submit, and update without a break until all have ended. Again, until so many were met: a busy machine may answer all before."""
    results: list[GenerationResult] = []
    deadline = time.monotonic() + WAIT_S
    while sum(map(met, results)) < wanted:
        assert time.monotonic() < deadline
        submitted = engine.handle.submit.remote("c", requests)  # the first update comes at the same time
        found: list[GenerationResult] = []
        while len(found) < len(requests):
            assert time.monotonic() < deadline
            update()
            found += get(engine.handle.collect.remote("c", 0.005))
        get(submitted)
        assert sorted(r.request_id for r in found) == sorted(r.request_id for r in requests)
        results += found
    return results


def updated(result: GenerationResult) -> bool:
    return len(result.weight_segments) > 1


@torch.no_grad()
def fresh_logprobs(model: PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """[texts, longest, vocabulary]; padded on the right, which a causal model does not see."""
    longest = max(map(len, texts))
    return model(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits.log_softmax(-1)


def test_no_request_is_lost_and_recomputed_tokens_are_those_of_their_version(engine: RunningEngine) -> None:
    requests = {r.request_id: r for r in many(GENERATIONS)}
    updates = Updates(engine)
    updates.next("wait")
    results = under_updates(engine, list(requests.values()), updates.next, updated, GENERATIONS // 20)
    texts = [requests[result.request_id].prompt_token_ids + result.token_ids for result in results]
    tables = {model: fresh_logprobs(model, texts) for model in set(updates.models.values())}
    worst = 0.0
    for row, result in enumerate(results):
        asked = requests[result.request_id]
        if result.finish_reason == "length":
            assert len(result.token_ids) == min(asked.max_new_tokens, CONTEXT - len(asked.prompt_token_ids))
        else:
            assert result.token_ids[-1] in EOS
        assert not set(result.token_ids[:-1]) & set(EOS)
        assert len(result.weight_versions) == len(result.logprobs) == len(result.token_ids)
        assert result.weight_versions == sorted(result.weight_versions)
        assert updated(result) == (result.weight_version_start != result.weight_segments[-1][0])
        places = zip(result.token_ids, result.weight_versions, result.logprobs, strict=True)
        for place, (token, version, logprob) in enumerate(places, len(asked.prompt_token_ids)):
            worst = max(worst, abs(float(tables[updates.models[version]][row, place - 1, token]) - logprob))
    mixed = sum(map(updated, results))
    print(f"{mixed} of {len(results)} mixed, {len(updates.pauses)} updates, largest log-probability difference {worst:.1e}")
    assert worst < 1e-4
    assert max(updates.pauses) > 0
    health = get(engine.handle.health.remote())
    assert (health.state, health.running_requests, health.failure) == ("ready", 0, "")


@torch.no_grad()
def stale_logprob(old: PreTrainedModel, new: PreTrainedModel, text: list[int], at: int) -> torch.Tensor:
    """Of the token at `at`, the first under `new`: `old` has filled the cache up to two before it."""
    cache = DynamicCache()
    old(torch.tensor([text[: at - 1]]), past_key_values=cache)
    return new(torch.tensor([text[at - 1 : at]]), past_key_values=cache).logits[0, -1].log_softmax(-1)


def test_without_recomputing_the_cache_stays_that_of_the_old_weights(engine: RunningEngine) -> None:
    requests = {r.request_id: r for r in many(320, temperature=0.0, max_new_tokens=40)}
    updates = Updates(engine)
    updates.next("wait")

    def changed(result: GenerationResult) -> bool:
        """By an update to the other weights: between two steps there may be two."""
        return updated(result) and updates.models[result.weight_segments[0][0]] is not updates.models[result.weight_segments[1][0]]

    results = under_updates(engine, list(requests.values()), lambda: updates.next("in_flight", recompute=False), changed, 4)
    stale, fresh = 0.0, 0.0
    for result in (checked := [result for result in results if changed(result)]):
        prompt = requests[result.request_id].prompt_token_ids
        text, ((old, count), (new, _)) = prompt + result.token_ids, result.weight_segments[:2]
        at = len(prompt) + count
        expected = stale_logprob(updates.models[old], updates.models[new], text, at)
        assert int(expected.argmax()) == text[at]  # greedy: the boundary is exact, to the token
        stale = max(stale, abs(float(expected[text[at]]) - result.logprobs[count]))
        fresh = max(fresh, abs(float(fresh_logprobs(updates.models[new], [text])[0, at - 1, text[at]]) - result.logprobs[count]))
    print(f"{len(checked)} first tokens after an update: {stale:.1e} from the stale cache's, {fresh:.1e} from a fresh one's")
    assert stale < 1e-4
    assert fresh > 1e-2


def test_recomputing_goes_on_in_each_request_s_random_numbers(engine: RunningEngine) -> None:
    updates = Updates(engine)
    version = updates.next("wait")
    requests = many(160, max_new_tokens=40)
    undisturbed = {r.request_id: r.token_ids for r in engine.generate(requests)}
    weights = ray.put(weights_of(updates.models[version]))

    def update() -> None:
        get(engine.handle.update_weights.remote(weights, next(_versions), UpdateOptions("in_flight")))

    results = under_updates(engine, requests, update, updated, 1)
    assert all(r.token_ids == undisturbed[r.request_id] for r in results)


def test_waiting_lets_running_requests_end_under_the_old_weights(engine: RunningEngine) -> None:
    updates = Updates(engine)
    before = updates.next("wait")
    get(engine.handle.submit.remote("c", many(64, max_new_tokens=40)))
    version = next(_versions)
    update = engine.handle.update_weights.remote(updates._choices[version % 2][1], version, UpdateOptions())
    late: list[GenerationRequest] = []
    while not ray.wait([update], timeout=0)[0]:
        late.append(request(f"late-{len(late)}", PROMPTS[0]))
        get(engine.handle.submit.remote("c", late[-1:]))
    assert get(update).pause_s == 0.0
    results = collect(engine, "c", 64 + len(late))
    assert len(results) == 64 + len(late)
    for result in results:
        assert len(result.weight_segments) == 1
        if not result.request_id.startswith("late"):
            assert result.weight_segments[-1][0] == before
    assert get(engine.handle.health.remote()).weight_version == version


def test_weights_that_do_not_fit_leave_running_requests_going(engine: RunningEngine) -> None:
    updates = Updates(engine)
    version = updates.next("wait")
    get(engine.handle.submit.remote("c", many(40)))
    with pytest.raises(WeightMismatchError):
        get(engine.handle.update_weights.remote({}, 1, UpdateOptions("in_flight")))
    results = collect(engine, "c", 40)
    assert len(results) == 40
    assert {r.weight_segments for r in results} == {((version, len(r.token_ids)),) for r in results}


def test_clients_do_not_see_each_other_s_results(engine: RunningEngine) -> None:
    requests = many(100, max_new_tokens=40)[::-1]  # the engine runs 32 at a time: '0' begins last
    deadline, refused = time.monotonic() + WAIT_S, None
    while refused is None:  # a busy machine may have answered it before it is asked again
        assert time.monotonic() < deadline
        submitted = [engine.handle.submit.remote(client, asked) for client, asked in (("a", requests), ("a", many(1)), ("b", requests))]
        get(submitted[0])
        try:
            get(submitted[1])
        except RequestError as error:
            refused = error
        get(submitted[2])
        expected = {"a": [*range(100)] if refused else [0, *range(100)], "b": [*range(100)]}
        for client, numbers in expected.items():
            assert sorted(int(r.request_id) for r in collect(engine, client, len(numbers))) == numbers
    assert "request '0' of client 'a' is running already" in str(refused)
    assert get(engine.handle.collect.remote("a", 0.0)) == []


def test_an_aborted_request_has_no_result_and_others_have(engine: RunningEngine) -> None:
    requests = many(64, max_new_tokens=40)
    asked, deadline, stopped = [str(i) for i in range(0, 64, 2)], time.monotonic() + WAIT_S, list[str]()
    while not stopped:  # a busy machine may answer all before
        assert time.monotonic() < deadline
        submitted = engine.handle.submit.remote("c", requests)
        stopped = get(engine.handle.abort.remote("c", [*asked, "never"]))
        get(submitted)
        assert set(stopped) <= set(asked)
        results = collect(engine, "c", 64 - len(stopped))
        assert sorted([r.request_id for r in results] + stopped) == sorted(r.request_id for r in requests)
        assert get(engine.handle.collect.remote("c", 0.2)) == []
    assert get(engine.handle.abort.remote("c", asked)) == []
    assert len(engine.generate(requests)) == 64


def test_an_engine_that_is_not_started_says_so() -> None:
    with pytest.raises(RuntimeError, match="the engine is new"):
        Engine(GenerationConfig(), "nowhere", 0, EOS).submit("c", [])
