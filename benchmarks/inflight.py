"""How long running requests stand still for a weight update in flight, and what it costs them. CPU; about a minute with the start.

One engine actor (vLLM `LLMEngine` in process, enforce_eager, float32) with a random Qwen3 of 2 layers, hidden size 64 and a vocabulary of
128: so the figures are those of the machinery, not of copying weights, which grows with the model. Requests of 4 to 40 tokens are
submitted so that `LOAD` are always out, twice the running batch; two sets of weights take turns. Rounds of three kinds are interleaved,
so that the machine's noise meets all alike: no update, updates that keep the KV cache, updates that recompute it.

  pause     `WeightUpdate.pause_s`: from the end of the step before an update to the leave for the next, as the engine measures it.
            Updates that found nothing running count 0 there and are left out here (`idle` says how many).
  call      an update as its caller sees it: Ray, waiting for the running step to end, checking the weights, the pause.
  tokens/s  of finished responses, over all rounds of a kind.

Every response is checked: none lost, none twice, none short of its length without an eos token, one weight version per token, never
falling. `value` is the 99th percentile of the pause over all updates.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.generation.engine import engine_actor_class
from actors.generation.pool import EnginePool
from actors.generation.types import GenerationRequest, GenerationResult, UpdateOptions
from configs.rollout import GenerationConfig

EOS = tuple(range(1, 5))
KINDS = ("none", "keep", "recompute")
ROUNDS = 6  # of each kind
ROUND_S = 1.0
BATCH, LOAD, CONTEXT = 32, 64, 64
NAMESPACE, ENGINE = "benchmark-inflight", "engine-0"


@dataclass
class Kind:
    """What the rounds of a kind have seen."""

    pauses: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def model(seed: int) -> Qwen3ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True,
    }  # fmt: skip
    made = Qwen3ForCausalLM(Qwen3Config(**shape))
    made.eval()
    return made


def requests() -> Iterator[GenerationRequest]:
    """Without end; ids count up."""
    for number in itertools.count():
        prompt = [10 + (number + i) % 100 for i in range(4 + number % 9)]
        yield GenerationRequest(str(number), prompt, 4 + number % 37, 1.0, 1.0, number)


class Client:
    """Keeps `LOAD` requests out and checks what comes back."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool, self._source = pool, requests()
        self._out: dict[str, GenerationRequest] = {}
        self.finished = self.mixed = 0

    def fill(self) -> None:
        """Submit up to `LOAD`."""
        fresh = list(itertools.islice(self._source, LOAD - len(self._out)))
        self._out |= {request.request_id: request for request in fresh}
        self._pool.submit(fresh)

    def take(self, timeout_s: float) -> int:
        """Tokens of the responses that came."""
        results = self._pool.collect(timeout_s)
        for result in results:
            self._check(self._out.pop(result.request_id), result)  # a KeyError here is a response that came twice
        return sum(len(result.token_ids) for result in results)

    def drain(self) -> None:
        """Wait for all that is out."""
        deadline = time.monotonic() + 60
        while self._out:
            self.take(1.0)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(self._out)} responses did not come within 60 s")

    def _check(self, request: GenerationRequest, result: GenerationResult) -> None:
        versions = result.weight_versions
        if result.finish_reason == "length":
            assert len(result.token_ids) == request.max_new_tokens, result
        else:
            assert result.token_ids[-1] in EOS, result
        assert len(versions) == len(result.token_ids) == len(result.logprobs), result
        assert versions == sorted(versions), result
        self.finished += 1
        self.mixed += versions[0] != versions[-1]


def measure(pool: EnginePool, client: Client, weights: list[Any]) -> dict[str, Kind]:
    """The rounds."""
    kinds = {name: Kind() for name in KINDS}
    version = 0
    for name in KINDS * ROUNDS:
        kind, began = kinds[name], time.monotonic()
        while time.monotonic() - began < ROUND_S:
            client.fill()
            if name != "none":
                version += 1
                asked = time.monotonic()
                update = pool.end_update(
                    pool.begin_update(weights[version % 2], version, UpdateOptions("in_flight", name == "recompute")), version
                )
                kind.calls.append(time.monotonic() - asked)
                kind.pauses.append(update[ENGINE].pause_s)
            kind.tokens += client.take(0.02)
        kind.seconds += time.monotonic() - began
    client.drain()
    return kinds


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(1e3 * cuts[49], 2), "p99_ms": round(1e3 * cuts[98], 2), "max_ms": round(1e3 * max(seconds), 2)}


def main() -> None:
    """Start Ray and an engine, measure, print."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE, _node_ip_address="127.0.0.1")
    models = [model(seed) for seed in (0, 1)]
    weights = [ray.put({name: p.detach() for name, p in m.named_parameters()}) for m in models]
    with tempfile.TemporaryDirectory() as path:
        models[0].save_pretrained(path)
        config = GenerationConfig(kv_cache_gib=0.125, max_num_seqs=BATCH)
        options: dict[str, Any] = {"name": ENGINE, "namespace": NAMESPACE, "num_cpus": 1}
        options["runtime_env"] = {"env_vars": {"OMP_WAIT_POLICY": "passive"}}
        handle = engine_actor_class().options(**options).remote(config, path, 0, EOS)
        print(ray.get(handle.ready.remote(), timeout=300))
    pool = EnginePool(NAMESPACE, [ENGINE], timeout_s=60)
    client = Client(pool)
    kinds = measure(pool, client, weights)
    ray.get(handle.shutdown.remote(), timeout=60)
    ray.shutdown()

    pauses = {name: [pause for pause in kinds[name].pauses if pause > 0] for name in ("keep", "recompute")}
    plain = kinds["none"].tokens / kinds["none"].seconds
    detail: dict[str, Any] = {"responses": client.finished, "mixed": client.mixed, "tokens_per_s": round(plain)}
    for name in ("keep", "recompute"):
        kind = kinds[name]
        detail[name] = {
            "updates": len(kind.calls),
            "idle": len(kind.calls) - len(pauses[name]),
            "pause": percentiles(pauses[name]),
            "call": percentiles(kind.calls),
            "updates_per_s": round(len(kind.calls) / kind.seconds, 1),
            "tokens_per_s": round(kind.tokens / kind.seconds),
            "speed_against_no_update": round(kind.tokens / kind.seconds / plain, 3),
        }
        print(name, detail[name])
    value = percentiles(pauses["keep"] + pauses["recompute"])["p99_ms"]
    print(json.dumps({"name": "inflight_pause_p99", "value": value, "unit": "ms", "detail": detail}))


if __name__ == "__main__":
    main()
