"""Tokens/s of our collector against vLLM alone: the same prompts, lengths and engine settings, on one GPU, in one run.

  ours   the collector's loop: requests by Ray to an engine actor, responses with log-probabilities back, scored, into the data plane;
         counted until the last response (`generate`), and with scoring and storing (`stored`).
  vLLM   `LLM.generate` in a process of its own, token ids in and out, with the sampled tokens' log-probabilities (as GRPO needs them),
         without a seed per request; not stored anywhere.

Both engines are on the GPU all the time; their rounds take turns. Random weights of SmolLM2-135M's shape, no token ends a response.
`value` is tokens/s until the last response over vLLM's.

    .venv/bin/python -m benchmarks.rollout [--size 32x16x256] [--rounds 4] [field=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from actors import names
from actors.rollout.prompts import PromptEncoder, PromptStream
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
        from vllm import LLM, SamplingParams

        from actors.generation import vllm_executors

        self._llm, self._sampling = LLM(**vllm_executors.engine_arguments(config, model, 0, "host")), SamplingParams

    def generate(self, prompts: list[list[int]], length: int) -> tuple[int, float]:
        """Response tokens and seconds."""
        params = self._sampling(max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
        started = time.monotonic()
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), time.monotonic() - started


def draw(config: RunConfig, model: str, rounds: int) -> list[list[list[int]]]:
    """The prompts that the collector draws, round by round, each as often as it has responses."""
    from actors.environments import build

    stream, encoder = PromptStream(build(config.environment, config.seed), config.seed), PromptEncoder(model, None)
    prompts, responses = config.rollout.prompts_per_step, config.rollout.responses_per_prompt
    return [[encoder.prompt(problem) for _, problem in stream.draw(prompts) for _ in range(responses)] for _ in range(rounds)]


def main() -> None:
    """Take turns and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="32x16x256", help="prompts x responses x tokens")
    parser.add_argument("--shape", choices=gpu_run.SHAPES, default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=4)
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
            rows: list[dict[str, float]] = []
            for number, prompts in enumerate(draw(config, model, options.rounds + 1)):
                tokens, seconds = ray.get(alone.generate.remote(prompts, config.rollout.max_new_tokens), timeout=600)
                claim, report = gpu_run.rollout(number, config.rollout.prompts_per_step)
                gpu_run.ask(names.LEDGER, "trained", claim.uids)
                ours, generate = report["generated_tokens"], report["time/generate"]
                assert ours == tokens, f"{ours} response tokens, vLLM alone {tokens}"
                rows.append({
                    "alone": tokens / seconds, "generate": ours / generate,
                    "stored": ours / (generate + report["time/score_and_store"]),
                })  # fmt: skip
                print("  ".join(f"{name} {value:.0f} tokens/s" for name, value in rows[-1].items()), flush=True)
            ray.kill(alone)
    rows = rows[1:]  # the first round warms up
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    detail = {"size": options.size, "tokens_per_s": {name: round(value) for name, value in found.items()}}
    detail |= {"stored_to_alone": round(found["stored"] / found["alone"], 3)}
    ratio = round(found["generate"] / found["alone"], 3)
    print(json.dumps({"name": "rollout", "value": ratio, "unit": "our tokens/s / vLLM alone", "detail": detail}))


if __name__ == "__main__":
    main()
