"""`--check`: all of a run that can be tried without starting an actor, and what the run will cost.

output, resume, checkpoints ─► model, data, memory (what `prepare` of the flow's session sees) ─► placement ─► rewards of three prompts
    └─ a line for each; the first that does not hold ends it, as the run would have ended
─► seconds a step, hours, GPU-hours, GiB
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from actors.environments import Problem, build
from actors.environments.actor import EnvironmentActor, keys_and_secrets
from actors.environments.rewards.base import Response
from actors.environments.scoring.verdict import Verdict
from actors.models.hf import check_model_dir, parameter_count
from actors.models.memory_parts import GIB, ModelShape, candidate_bytes
from actors.models.memory_plan import gpu_capacity, render
from actors.models.step_plan import Device, StepPlan, cpu_device, gpu_device, gpu_name, plan_grpo, plan_sft, rough
from actors.preflight import check_memory, load_encoder, longest_sample, planned_memory
from actors.rollout.prompts import Problems, StreamedProblems
from actors.space import Room, Sizes, free_bytes, size
from configs.base import ConfigError
from configs.evaluate import EvaluateConfig
from configs.loader import load_any
from configs.run import BaseConfig, BaseRunConfig, RunConfig
from configs.sft import SftConfig
from flows.resume import origin_of
from tasks.cluster import probe
from tasks.launch import placement_here
from tasks.reporting.jsonl import read_lines
from tasks.reporting.run_dir import RunDirectory

# What only actors can find out.
NOT_CHECKED = "that the engine loads the model, that Ray and its workers start, and what a step really takes"
_SAMPLES, _MEASURED = 3, 32  # held-out prompts: whose rewards are shown, and whose length is the mean of a plan
_SHOWN = 60  # characters of a text
_LIKE = {"model", "rollout", "generation", "policy", "placement", "mode", "batch_size"}  # blocks that decide how long a step takes


def checked(config: BaseConfig, session: Any) -> Iterator[str]:
    """A line for everything that holds.

    Raises:
        ConfigError, UserEnvironmentError, CheckpointError: what does not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        yield from _outside(config, Path(scratch))
        prepared = session.prepare(config, Path(scratch) / "model")
        if prepared is None:  # of retrain
            yield "data: can be read, and the registry can be reached; the training recipe has a --check of its own"
            return
        problems = build(config.source, config.seed) if isinstance(config, RunConfig | EvaluateConfig) else None
        yield f"model, data: {_model(prepared.model_path)}; {_data(config, prepared, problems)}"
        if isinstance(config, BaseRunConfig | EvaluateConfig):
            yield from _placement(config)
        if isinstance(config, BaseRunConfig):
            yield from _disk(config, prepared.model_path, prepared.steps)
        if isinstance(config, RunConfig | EvaluateConfig) and problems is not None:
            yield from _rewards(config, problems)
        if isinstance(config, RunConfig | SftConfig):
            yield from _cost(config, prepared, problems)
    yield f"not checked without actors: {NOT_CHECKED}"


def _outside(config: BaseConfig, scratch: Path) -> Iterator[str]:
    """What is there before the run: its output, what it goes on from, a cluster, a server."""
    from flows.service.server import check_configured, configured_url

    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.output_dir).close()
    except OSError as error:
        raise ConfigError(f"output_dir: {config.output_dir} cannot be written: {error.strerror}") from None
    yield f"output_dir: {config.output_dir} can be written, {size(free_bytes(Path(config.output_dir)))} are free"
    if isinstance(config, BaseRunConfig):
        origin = origin_of(config, "check", scratch)
        yield f"resume: {'a new run' if origin is None else f'goes on after step {origin.step} of {origin.store.url}'}"
    if (url := configured_url()) is not None:
        check_configured(url)
        yield f"Prefect: {url} answers"
    if isinstance(config, BaseRunConfig | EvaluateConfig) and (address := config.ray.joined):
        probe(address)
        found = "is looked for when the run begins" if address == "auto" else "listens; whether it lets us in the run will see"
        yield f"Ray: {address} {found} (its nodes: grpo-flows doctor --cluster)"


def _model(path: str) -> str:
    return f"{check_model_dir(path).model_type}, {parameter_count(path) / 1e6:,.1f} M parameters"


def _data(config: BaseConfig, prepared: Any, problems: Problems | None) -> str:
    if problems is None:  # of sft
        return f"{prepared.data.train:,} samples to train on, {prepared.data.validation:,} held out, {prepared.data.dropped:,} too long"
    held_out = f"{problems.size('validation'):,} held out"
    if isinstance(config, EvaluateConfig):
        return held_out
    streamed = isinstance(problems, StreamedProblems)
    return f"{'a stream of' if streamed else format(problems.size('train'), ',')} prompts to train on, {held_out}"


def _placement(config: BaseRunConfig | EvaluateConfig) -> Iterator[str]:
    if config.ray.joined:
        yield "placement: is the cluster's, and was not looked at"
        return
    yield f"placement: {placement_here(config).describe()}"
    if not isinstance(config, BaseRunConfig):
        return
    warnings = check_memory(config)
    if needs := render(planned_memory(config), gpu_capacity()) if torch.cuda.is_available() else "":
        yield f"memory of a GPU, by phase of a step:\n{needs}"
    yield from (f"warning: {line}" for line in warnings)


def _disk(config: BaseRunConfig, model_path: str, steps: int) -> Iterator[str]:
    width = 4 if config.policy.dtype == "float32" else 2  # bytes
    sizes = Sizes.of(parameter_count(model_path), width, reference=config.policy.why_no_ref_logprob() is None)
    run = RunDirectory(Path(config.output_dir).resolve() / config.name)
    elsewhere = config.checkpoint.url is not None and "://" in config.checkpoint.url
    exports = 1 + config.checkpoint.keep_best
    warnings = Room(sizes, exports, None if elsewhere else Path(config.checkpoint.url or run.checkpoints), run.root).check(
        config.checkpoint, steps
    )
    yield f"disk: {size(sizes.checkpoint)} a checkpoint, {size(sizes.export)} the trained model"
    yield from (f"warning: {line}" for line in warnings)


def _held_out(problems: Problems, most: int) -> list[Problem]:
    return [problems.problem("validation", index) for index in range(min(most, problems.size("validation")))]


def _rewards(config: RunConfig | EvaluateConfig, every: Problems) -> Iterator[str]:
    """The rewards of held-out prompts, for the data's answer and for an empty response."""
    source, problems = config.source, _held_out(every, _SAMPLES)
    most = config.rollout.max_new_tokens if isinstance(config, RunConfig) else config.sampling.max_new_tokens
    said = [Response(text, 1, False) for problem in problems for text in (problem.answer, "")]
    with EnvironmentActor(source, config.paid, config.scoring, most, *keys_and_secrets(config, source)) as rewards:
        verdicts = rewards.score([problem for problem in problems for _ in range(2)], said)
    for number, problem in enumerate(problems):
        right, empty = verdicts[2 * number : 2 * number + 2]
        for verdict in (right, empty):
            if verdict.outcome != "scored":
                raise ConfigError(f"rewards: of prompt {problem.uid}: {verdict.error}")
        yield f"reward of {_short(problem)}: {_worth(right)}; of an empty response: {_worth(empty)}"


def _short(problem: Problem) -> str:
    question, answer = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in (problem.question, problem.answer))
    return f"{question!r} answered by {answer!r}"


def _worth(verdict: Verdict) -> str:
    parts = ", ".join(f"{label} {'no opinion' if part.value is None else f'{part.value:g}'}" for label, part in verdict.parts.items())
    return f"{verdict.reward:g} ({parts}{', right' if verdict.success else ''})"


def _cost(config: RunConfig | SftConfig, prepared: Any, problems: Problems | None) -> Iterator[str]:
    """What a step will take: as an earlier run of the same settings, else as planned, where it is known what computes."""
    elsewhere = config.ray.joined is not None
    gpus = 0 if elsewhere else placement_here(config).gpus
    if (before := _measured(config)) is not None:
        seconds, how = before
    elif elsewhere:
        yield "time: not estimated: what the cluster computes with was not looked at, and no earlier run in output_dir has these settings"
        return
    else:
        device = _device(gpus)
        if device is None:
            yield f"time: not estimated: nobody has looked up what a {gpu_name()} can do"
            return
        step = _planned(config, prepared, problems, device)
        seconds, how = step.seconds, f"planned for {device.name}, within a factor of two: {step.line()}; responses as long as they may be"
    hours = prepared.steps * seconds / 3600
    cost = f"{rough(hours * gpus)} GPU-hours" if gpus else "the cluster's GPUs were not looked at" if elsewhere else "no GPU"
    yield f"time: {rough(seconds)} s a step ({how})"
    yield f"time: {prepared.steps} steps: {rough(hours)} h, {cost}; start, warm start and validation come on top"
    if isinstance(config, RunConfig) and config.policy.has_candidates:
        tokens = config.samples_per_step * longest_sample(config, prepared.model_path)
        held = candidate_bytes(ModelShape.of(check_model_dir(prepared.model_path)), config.policy, tokens)
        yield f"data plane: at most {size(held)} of a teacher's candidates a step (policy.teacher.top_k)"
    peak = max((one.peak.total for one in planned_memory(config)), default=0.0)
    if gpus and peak:
        yield f"memory: {peak / GIB:.1f} GiB of a GPU at most"


def _device(gpus: int) -> Device | None:
    return gpu_device(gpu_name() or "") if gpus else cpu_device()


def _planned(config: RunConfig | SftConfig, prepared: Any, problems: Problems | None, device: Device) -> StepPlan:
    if isinstance(config, SftConfig):
        return plan_sft(config, prepared.model_path, prepared.data.longest, device)
    assert problems is not None  # of all flows but sft
    shape = check_model_dir(prepared.model_path)
    source = config.environment
    encoder = load_encoder(prepared.model_path, shape, source.system_prompt, source.chat_template_kwargs)
    tokens = statistics.fmean(len(encoder.prompt(problem)) for problem in _held_out(problems, _MEASURED))
    return plan_grpo(config, prepared.model_path, ModelShape.of(shape), tokens, device)


def _measured(config: BaseRunConfig) -> tuple[float, str] | None:
    """Median seconds of a step of the newest earlier run in `output_dir` that differs in nothing that matters, and its name."""
    wanted = config.model_dump(include=_LIKE)
    roots = [path for path in Path(config.output_dir).glob("*") if path.is_dir() and not path.is_symlink()]
    for root in sorted(roots, key=lambda path: path.stat().st_mtime, reverse=True):
        run = RunDirectory(root)
        with suppress(ConfigError, OSError, ValueError):
            if load_any(str(run.config)).model_dump(include=_LIKE) != wanted:
                continue
            if times := [row["time/step"] for row in read_lines(run.metrics) if "time/step" in row]:
                return statistics.median(times), f"the median of {len(times)} steps of {root}"
    return None
