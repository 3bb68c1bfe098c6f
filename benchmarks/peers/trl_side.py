"""One job of TRL's GRPO, in a process of its own: the prompts, the rewards and the held-out problems are this project's.

    problems ─► Dataset ─► GRPOTrainer (vLLM colocated) ─► reward function ─► this project's verifier
                               └ a callback takes the time of each step

What TRL is told is what our recipe says; everything else is TRL's default, but for gradient checkpointing, which costs it time that this
GPU's memory does not ask for. Imports TRL: only inside `work`.

    python -m benchmarks.peers.trl_side JOB.json MODEL-DIRECTORY
"""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.environments import Environment, Problem
from actors.environments.registry import build
from actors.environments.rewards.base import Response
from actors.environments.rewards.build import build_rewards
from actors.environments.scoring.verdict import Verdict, combine, part_of
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.statistics import Tally, accuracy
from actors.rollout.validation import held_out_problems
from benchmarks import gpu_run, grpo_step
from benchmarks.peers.jobs import Job, Triple
from configs.loader import load
from configs.run import RunConfig

RECIPE = "smollm2-135m-1gpu"
HELD_OUT = 512
WARM_UP = grpo_step.WARM_UP  # steps of a `step` job that do not count
_PROMPT = 64  # tokens at most, about: of the sums' chats


def recipe(job: Job) -> RunConfig:
    """What this project runs for the same job."""
    if job.part == "step":
        return grpo_step.configure(job.size, [], engines=1)
    return load(RECIPE, learning_overrides(job))


def learning_overrides(job: Job) -> list[str]:
    """Of the recipe, for a learning run of either side."""
    prompts, responses, length = job.size.split("x")
    # TRL trains on every group that it draws.
    sampled = [
        "rollout.dynamic_sampling=false",
        f"rollout.prompts_per_step={prompts}",
        f"rollout.responses_per_prompt={responses}",
        f"rollout.max_new_tokens={length}",
    ]
    return [f"seed={job.seed}", f"steps={job.steps}", f"validate_every={job.steps}", f"environment.validation_size={HELD_OUT}", *sampled]


def settings_of(job: Job, config: RunConfig) -> dict[str, Any]:
    """Arguments of trl.GRPOConfig that are not its defaults, but for the output directory. Pure."""
    sampled, loss, optimizer = config.rollout, config.policy.loss, config.policy.optimizer
    batch, length = config.samples_per_step, sampled.max_new_tokens + (_PROMPT if job.part == "learning" else grpo_step.PROMPT)
    rows = min(batch, 2 ** round(math.log2(grpo_step.MICRO_BATCH / length)))  # micro-batches of as many tokens as ours
    return {
        "max_steps": job.steps + (WARM_UP if job.part == "step" else 0),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": batch // rows,
        "num_generations": sampled.responses_per_prompt,
        "max_completion_length": sampled.max_new_tokens,
        "temperature": sampled.temperature,
        "top_p": sampled.top_p,
        "beta": loss.kl_coef,
        "epsilon": loss.clip_low,
        "epsilon_high": loss.clip_high,
        "loss_type": {"token_mean": "dapo", "sequence_mean": "grpo", "fixed_length": "dr_grpo"}[loss.aggregation],
        "scale_rewards": loss.normalize_advantages,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "seed": config.seed,
        "shuffle_dataset": False,  # the order is that of our stream
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": config.generation.max_model_len,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | ({"generation_kwargs": {"ignore_eos": True}} if job.part == "step" else {})


class Sums:
    """This project's verifier, called as TRL calls a reward."""

    def __init__(self, config: RunConfig, environment: Environment) -> None:
        self._config = config
        self._rewards = build_rewards(config.paid, max_new_tokens=config.rollout.max_new_tokens, environment=environment)

    def verdict(self, problem: Problem, text: str) -> Verdict:
        """On one response. The sums' verifier needs no process that can be killed."""
        parts = {label: part_of(reward.score(problem, Response(text, 0, False)), 0.0) for label, reward in self._rewards.items()}
        return combine(parts, self._config.paid, self._config.scoring)

    def accuracy(self, problems: Sequence[Problem], texts: Sequence[str]) -> Triple:
        """Of one answer to each problem, with its interval."""
        tallies = [Tally.of([self.verdict(problem, text).success]) for problem, text in zip(problems, texts, strict=True)]
        found = accuracy(tallies, self._config.validation.confidence)
        return round(found.value, 4), round(found.low, 4), round(found.high, 4)


def said(completion: Any) -> str:
    """The text of a completion: TRL gives text, or the messages of a chat."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def rows(problems: Sequence[Problem], *, chat: bool) -> list[dict[str, Any]]:
    """TRL's data set: each problem as `PromptEncoder` puts it, and its number."""
    return [
        {"prompt": [{"role": "user", "content": one.question}] if chat else f"{one.question}\n", "number": number}
        for number, one in enumerate(problems)
    ]


def work(job: Job, model: str) -> dict[str, Any]:
    """Train, and validate before and after where it learns. Returns what `Result` has of it."""
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, memory = recipe(job), gpu_run.Memory()
    environment, encoder = build(config.environment, config.seed), PromptEncoder(model, config.environment.system_prompt)
    settings, sums = settings_of(job, config), Sums(config, environment)
    count = settings["max_steps"] * config.rollout.prompts_per_step
    problems = [problem for _, problem in PromptStream(environment, config.seed).draw(count)]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.monotonic())
            if len(ends) == WARM_UP:
                memory.peak_gib()

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        if job.part == "step":  # of random weights all rewards are alike, and a gradient of zeros would be a special case
            return [random.random() for _ in completions]
        return [sums.verdict(problems[one], said(text)).reward for one, text in zip(number, completions, strict=True)]

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=GRPOConfig(output_dir=directory, **settings), callbacks=[Clock()],
            train_dataset=datasets.Dataset.from_list(rows(problems, chat=encoder.tokenizer.chat_template is not None)),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left", truncation_side="left"),
        )  # fmt: skip
        same_prompt(trainer, encoder, problems[0])
        before = validate(trainer, config, encoder, sums, environment) if job.part == "learning" else None
        started = time.monotonic()
        trainer.train()
        after = validate(trainer, config, encoder, sums, environment) if job.part == "learning" else None
    memory_gib = memory.peak_gib()
    memory.close()
    seconds = [end - start for start, end in zip([started, *ends], ends, strict=False)]
    return {
        "steps_s": [round(one, 3) for one in (seconds[WARM_UP:] if job.part == "step" else seconds)],
        "peak_gib": memory_gib,
        "rewards": [round(row["reward"], 4) for row in trainer.state.log_history if "reward" in row],
        "before": before, "after": after, "settings": settings,
        "versions": {name: importlib.import_module(name).__version__ for name in ("trl", "transformers", "vllm", "torch")},
    }  # fmt: skip


def same_prompt(trainer: Any, encoder: PromptEncoder, problem: Problem) -> None:
    """Both sides ask in the same tokens.

    Raises:
        RuntimeError: they do not.
    """
    chat = encoder.tokenizer.chat_template is not None
    theirs = trainer._tokenize_prompts([rows([problem], chat=chat)[0]["prompt"]])[0][0]
    if list(theirs) != (ours := encoder.prompt(problem)):
        raise RuntimeError(f"TRL asks in tokens {list(theirs)}, this project in {ours}")


def validate(trainer: Any, config: RunConfig, encoder: PromptEncoder, sums: Sums, environment: Environment) -> Triple:
    """Greedy answers to the held-out problems by TRL's engine with the present weights."""
    from vllm import SamplingParams

    problems = held_out_problems(environment)
    trainer.vllm_generation.sync_weights()
    prompts: Any = [{"prompt_token_ids": encoder.prompt(problem)} for problem in problems]
    greedy = SamplingParams(temperature=config.rollout.validation_temperature, max_tokens=config.rollout.max_new_tokens)
    outputs = trainer.vllm_generation.llm.generate(prompts, greedy, use_tqdm=False)
    return sums.accuracy(problems, [encoder.text(list(output.outputs[0].token_ids)) for output in outputs])


def main() -> None:
    """Do the job, print the JSON line."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    print(json.dumps({"name": "trl", **work(job, sys.argv[2])}), flush=True)


if __name__ == "__main__":
    main()
