"""Tokens/s of our collector against vLLM alone: the same prompts, lengths and engine settings, on one GPU, in one run.

  ours   the collector's loop: requests by Ray to an engine actor, responses with log-probabilities back, scored, into the data plane;
         counted until the last response (`generate`), and with scoring and storing (`stored`).
  vLLM   `LLM.generate` in a process of its own, token ids in and out; not stored anywhere.

Both get the same prompts with the same sampling options (those of a run: a seed for each request, the sampled tokens' log-probabilities),
and both processes keep what their start has made out of Python's garbage collector. Both engines are on the GPU all the time; their
rounds take turns, and so does who goes first. Each round of ours is a step of a synchronous run: before it, outside its time, the weight
version grows and the weights are sent again. Random weights of SmolLM2-135M's shape, no token ends a response. `value` is the median over
the rounds of our tokens/s until the last response over vLLM's.

    .venv/bin/python -m benchmarks.rollout [--size 32x16x256] [--rounds 6] [field=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from actors import names
from actors.generation.types import GenerationRequest, UpdateOptions
from actors.heap import freeze_heap
from actors.policy.turns import Turn
from actors.rollout.in_flight import PromptGroup, group_requests
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.transitions import Admitted
from benchmarks import gpu_run
from benchmarks.grpo_step import configure
from configs import settings
from configs.rollout import GenerationConfig
from configs.run import RunConfig


class Alone:
    """vLLM by itself."""

    def __init__(self, config: GenerationConfig, model: str) -> None:
        from actors.generation.engine import prepare_process

        prepare_process(config)
        settings.set_for_process(VLLM_ENABLE_V1_MULTIPROCESSING="1")  # vLLM's default
        from vllm import LLM

        from actors.generation import vllm_executors

        self._llm = LLM(**vllm_executors.engine_arguments(config, model, 0, "host"))
        freeze_heap()

    def generate(self, requests: list[GenerationRequest]) -> tuple[int, float]:
        """Response tokens and seconds. The requests' own sampling options; no token ends a response."""
        from actors.generation.sampling import sampling_params

        started = time.monotonic()
        inputs: Any = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        outputs = self._llm.generate(inputs, [sampling_params(request, ()) for request in requests], use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), time.monotonic() - started


def draw(config: RunConfig, model: str, rounds: int) -> list[list[GenerationRequest]]:
    """What the collector asks the engines for, round by round."""
    from actors.environments import build

    stream = PromptStream(build(config.environment, config.seed), config.seed, encoder=PromptEncoder(model, None), room=2**31)
    rows, found = tuple(map(str, range(config.rollout.responses_per_prompt))), []
    for number in range(rounds):
        drawn = stream.draw_encoded(config.rollout.prompts_per_step)
        groups = [PromptGroup(one.problem, one.token_ids, Admitted(one.uid, rows, number, None)) for one in drawn]
        found.append([request for group in groups for request in group_requests(group, config.rollout, config.seed)])
    return found


def ours(config: RunConfig, engines: Sequence[str], number: int) -> tuple[int, float, float]:
    """Response tokens; seconds until the last, and until all were scored and stored."""
    if number:  # a synchronous step takes responses of its own version only
        gpu_run.ask(names.POLICY, "pass_over", Turn(number, "train"))
        gpu_run.ask(names.POLICY, "refit", engines, UpdateOptions())
    claim, report = gpu_run.rollout(number, config.rollout.prompts_per_step)
    gpu_run.ask(names.LEDGER, "trained", claim.uids)  # else the next round's groups get no places
    return int(report["generated_tokens"]), report["time/generate"], report["time/generate"] + report["time/score_and_store"]


def turns(config: RunConfig, engines: Sequence[str], alone: Any, requests: Sequence[list[GenerationRequest]]) -> Iterator[dict[str, float]]:
    """Tokens/s of each round. Who goes first alternates."""

    def by_itself() -> tuple[int, float]:
        found: tuple[int, float] = ray.get(alone.generate.remote(requests[number]), timeout=600)
        return found

    for number in range(len(requests)):
        if number % 2:
            mine, (tokens, seconds) = ours(config, engines, number), by_itself()
        else:
            (tokens, seconds), mine = by_itself(), ours(config, engines, number)
        assert mine[0] == tokens, f"{mine[0]} response tokens, vLLM alone {tokens}"
        yield {"alone": tokens / seconds, "generate": tokens / mine[1], "stored": tokens / mine[2]}


def main() -> None:
    """Take turns and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="32x16x256", help="prompts x responses x tokens")
    parser.add_argument("--shape", choices=gpu_run.SHAPES, default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args()
    config = configure(options.size, options.overrides, engines=1)
    with tempfile.TemporaryDirectory() as directory:
        model = gpu_run.write_model(Path(directory), options.shape, 2048)
        with gpu_run.running(config, model) as actors:
            gpu_run.never_end(actors.engines)
            # Beside Ray's books: its GPU is the engine's.
            alone: Any = ray.remote(num_cpus=1)(Alone).remote(config.generation, model)
            gpu_run.ask(names.COLLECTOR, "begin_generating")
            rows = []
            for row in turns(config, actors.engines, alone, draw(config, model, options.rounds + 2)):
                rows.append(row)
                print("  ".join(f"{name} {value:.0f} tokens/s" for name, value in row.items()), flush=True)
            ray.kill(alone)
    rows = rows[2:]  # one round of each order warms up
    value, detail = compare(rows)
    print(json.dumps({"name": "rollout", "value": value, "unit": "our tokens/s / vLLM alone", "detail": {"size": options.size} | detail}))


def compare(rows: Sequence[dict[str, float]]) -> tuple[float, dict[str, Any]]:
    """The median of the rounds' ratios; medians of the rest, and the ratios' smallest and largest."""
    ratios = {name: [row[name] / row["alone"] for row in rows] for name in ("generate", "stored")}
    detail = {
        "tokens_per_s": {name: round(statistics.median(row[name] for row in rows)) for name in rows[0]},
        "spread": [round(min(ratios["generate"]), 3), round(max(ratios["generate"]), 3)],
        "stored_to_alone": round(statistics.median(ratios["stored"]), 3),
    }
    return round(statistics.median(ratios["generate"]), 3), detail


if __name__ == "__main__":
    main()
