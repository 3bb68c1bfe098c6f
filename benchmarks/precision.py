"""Where engine and trainer disagree: log-probabilities of the same tokens, and each operation on the way to them, by dtype.

    vLLM      samples responses, one sequence at a time: prompt, then token by token ─┐  hooks: what each operation gave
    Megatron  passes prompt and response through at once, as the logprob stage does   ─┴─► compared place by place

An operation's inputs are what the operations before it made of theirs, so its difference has grown since the embedding: the table shows
where it begins (the first operation that is not equal to the bit), and where it grows. `sampler` is the log-probability that the engine
reported against the one that float32 makes of the engine's own logits. Differences are relative: |engine - trainer| / |trainer|, as norms.
A second table has each operation on the engine's own inputs (precision_replay.py), a third what formulas in plain torch make of these
(precision_candidates.py); --exact runs the trainer with the engine's arithmetic (precision_exact.py).

Same weights on both sides: those of the recipe's model, in the dtype. `value` is the mean of |engine - trainer| over tokens, in the
dtype named last.

    .venv/bin/python -m benchmarks.precision [--recipe arithmetic-cpu] [--dtypes float32 bfloat16 float16] [--prompts 4] [--tokens 16]
                                             [--exact | --batch-invariant]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.models.hf import check_model_dir, head_dim
from actors.preflight import prepare_model
from benchmarks.precision_candidates import tried
from benchmarks.precision_hooks import Key, Recorder, of_engine, of_trainer
from benchmarks.precision_replay import following, replayed, table, words
from configs import settings
from configs.loader import load
from configs.policy import PolicyConfig
from configs.rollout import GenerationConfig
from configs.run import RunConfig

_LIMIT_S = 580.0


def sample(model: str, dtype: str, prompts: list[list[int]], tokens: int, out: str, invariant: bool) -> None:
    """The engine's side, in a process of its own: responses, their log-probabilities, and what its operations gave.

    Args:
        invariant: with vLLM's batch-invariant kernels, which are for GPUs.
    """
    from actors.generation.engine import prepare_process

    cuda = torch.cuda.is_available()
    longest = max(map(len, prompts)) + tokens + 1
    config = GenerationConfig(dtype=dtype, max_num_seqs=1, max_model_len=longest, kv_cache_gib=1)
    prepare_process(config)
    settings.set_for_process(VLLM_BATCH_INVARIANT=str(int(invariant)))
    from vllm import LLM, SamplingParams

    from actors.generation import vllm_executors

    llm = LLM(**vllm_executors.engine_arguments(config, model, 0, "host"))
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True, logprobs=0, detokenize=False)
    found = []
    recorder = Recorder()
    llm.apply_model(lambda module: of_engine(module, recorder))
    for prompt in prompts:
        recorder.clear()
        inputs: Any = [{"prompt_token_ids": prompt}]
        response = llm.generate(inputs, params, use_tqdm=False)[0].outputs[0]
        ids = list(response.token_ids)
        steps: Any = response.logprobs
        logprobs = [step[token].logprob for step, token in zip(steps, ids, strict=True)]
        one: dict[str, Any] = {"prompt": prompt, "response": ids, "logprobs": logprobs, "operations": recorder.rows()}
        recorder.clear(follow={key: rows for key, rows in one["operations"].items() if key[0] != "head"})
        found.append(one | {"replay": {"operations": _whole(llm, recorder, prompt, ids)}})
    torch.save(found, out)
    print(f"engine: {dtype} on {'a GPU' if cuda else 'a CPU'}, {len(prompts)} x {tokens} tokens", flush=True)


def _whole(llm: Any, recorder: Recorder, prompt: list[int], ids: list[int]) -> dict[Key, torch.Tensor]:
    """The engine's operations on all tokens at once, each on the inputs that it had token by token."""
    from vllm import SamplingParams

    given: Any = [{"prompt_token_ids": prompt + ids}]
    llm.generate(given, SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    found = recorder.rows()
    found["head", 0] = recorder.largest_call("head")[len(prompt) - 1 :][: len(ids)]  # another call is about the token to come
    return found


def score(model: str, dtype: str, sampled: str, out: str, invariant: bool, exact: bool = False) -> None:
    """The trainer's side, in a process of its own: log-probabilities of the engine's responses, and what its operations gave.

    Args:
        invariant: with Megatron's batch-invariant kernels, which are for GPUs. exact: with the engine's arithmetic (precision_exact.py).
    """
    from actors.data_plane.in_memory import MemoryPlane
    from actors.data_plane.meta import KVBatchMeta
    from actors.data_plane.sharding import plan_batch
    from actors.policy.worker import PolicyWorker

    plane = MemoryPlane()
    plane.register_partition("precision", fields=["input_ids", "token_mask", "sample_mask", "policy_logprobs"])
    config = PolicyConfig(dtype=dtype, batching={"micro_batch_size": 1})
    align = config.parallel.row_multiple("cuda" if torch.cuda.is_available() else "cpu")
    if invariant:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode

        enable_batch_invariant_mode()
    worker = PolicyWorker(config, model, 0, plane, seed=0, temperature=1.0)
    worker.setup(f"file://{out}.rendezvous")
    if exact:
        from benchmarks.precision_exact import swap

        swap(worker._bare)
    recorder = Recorder()
    of_trainer(worker._bare, recorder, head_dim(check_model_dir(model)))
    found: list[dict[str, Any]] = []
    for number, one in enumerate(torch.load(sampled)):
        recorder.clear()
        ids, prompt = torch.tensor(one["prompt"] + one["response"]), len(one["prompt"])
        meta = KVBatchMeta(
            partition_id="precision", task_name="precision", keys=(f"row-{number}",), sequence_lengths=(len(ids),),
            tags=({"response_length": len(ids) - prompt},),
        )  # fmt: skip
        mask = torch.arange(len(ids)) >= prompt
        meta = plane.put(meta, {"input_ids": [ids], "token_mask": [mask], "sample_mask": [torch.tensor(1.0)]})
        plan = plan_batch(meta, config.batching, data_parallel=1, align=align).shards[0]

        def whole(plan: Any = plan, meta: Any = meta, prompt: int = prompt) -> dict[str, Any]:
            worker.logprob(plan, "policy_logprobs")
            logprobs = plane.get(meta.with_fields("policy_logprobs"), ["policy_logprobs"])["policy_logprobs"][0]
            return {"logprobs": logprobs[prompt:].tolist(), "operations": recorder.rows()}

        own = whole()
        recorder.clear(follow=following(one))
        own["replay"] = whole()
        recorder.clear()
        if not found and not torch.cuda.is_available():
            worker.call_on_device(functools.partial(worker._gradients, plan, "sft"))
            own["gradient"] = torch.cat([parameter.main_grad.flatten() for parameter in worker._bare.parameters()])
        found.append(own)
    torch.save(found, out)
    worker.close()


def compare(sampled: list[dict[str, Any]], scored: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of a dtype: log-probabilities, and each operation in order, layers together.

    Returns:
        tokens, mean and max of |engine - trainer|; first: the first operation, and its layer, that differs in a bit (None: none does);
        operations: by name the relative difference in the layer where it is largest, and in the first layer.
    """
    errors: list[float] = []
    seen: dict[tuple[str, int], list[float]] = {}
    first: dict[str, Any] | None = None
    for mine, theirs in zip(sampled, scored, strict=True):
        errors += [abs(a - b) for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True)]
        prompt, length = len(mine["prompt"]), len(mine["prompt"]) + len(mine["response"]) - 1  # the last token goes through no engine
        for (name, layer), ours in mine["operations"].items():
            if (name, layer) not in theirs["operations"]:
                continue
            ours, other = ours[:length], theirs["operations"][name, layer][:length]
            if name == "head":  # an engine computes the logits of what it samples
                ours, other = ours[: len(mine["response"])], other[prompt - 1 :]
            ours, other = ours.float(), other[..., : ours.shape[-1]].float()
            gap = float((ours - other).norm() / other.norm())
            seen.setdefault((name, layer), []).append(gap)
        seen.setdefault(("sampler", 0), []).append(_sampler(mine))
    by_name: dict[str, dict[int, float]] = {}
    for (name, layer), gaps in seen.items():
        by_name.setdefault(name, {})[layer] = max(gaps)
    for (name, layer), gaps in seen.items():
        if first is None and max(gaps) > 0:
            first = {"operation": name, "layer": layer}
    operations = {
        name: {"layers": len(layers), "first_layer": _short(layers[min(layers)]), "largest": _short(max(layers.values()))}
        for name, layers in by_name.items()
    }
    mean, largest = _short(sum(errors) / len(errors)), _short(max(errors))
    return {"tokens": len(errors), "mean": mean, "max": largest, "first": first, "operations": operations}


def _sampler(mine: dict[str, Any]) -> float:
    ids, logits = torch.tensor(mine["response"]), mine["operations"]["head", 0][: len(mine["response"])].float()
    exact = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return float((torch.tensor(mine["logprobs"]) - exact).abs().max())


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _apart(target: Callable[..., None], *arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(_LIMIT_S)
    if process.exitcode != 0:
        process.kill()
        raise SystemExit(f"error: {target.__name__} did not end well (exit code {process.exitcode})")


def draw(config: RunConfig, model: str, count: int) -> list[list[int]]:
    """Prompts of the recipe."""
    from actors.environments import build
    from actors.rollout.prompts import PromptEncoder, PromptStream

    stream, encoder = PromptStream(build(config.environment, config.seed), config.seed), PromptEncoder(model, None)
    return [encoder.prompt(problem) for _, problem in stream.draw(count)]


def _of_dtype(model: str, dtype: str, prompts: list[list[int]], options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Both sides, and what is printed of them."""
    invariant = options.batch_invariant
    files = {side: f"{directory}/{dtype}-{side}.pt" for side in ("engine", "trainer", "exact")}
    _apart(sample, model, dtype, prompts, options.tokens, files["engine"], invariant)
    _apart(score, model, dtype, files["engine"], files["trainer"], invariant)
    sampled, scored = torch.load(files["engine"]), torch.load(files["trainer"])
    report = compare(sampled, scored)
    print(f"{dtype}: mean {report['mean']:g}, max {report['max']:g}; first to differ: {report['first']}")
    for name, row in report["operations"].items():
        print(f"  {name:22} first layer {row['first_layer']:<9g} largest of {row['layers']}: {row['largest']:g}")
    report["replay"] = replayed(sampled, scored)
    print(f"{dtype}: each operation on the engine's inputs, all tokens at once against token by token")
    print(*table(report["replay"]), sep="\n")
    report["candidates"] = tried(sampled, model, dtype)
    print(f"{dtype}: formulas in plain torch on the engine's inputs")
    for name, candidates in report["candidates"].items():
        print(*(f"  {name:22} {candidate:36} {words(row)}" for candidate, row in candidates.items()), sep="\n")
    if options.exact:
        _apart(score, model, dtype, files["engine"], files["exact"], invariant, True)
        report["exact"] = found = agreement(sampled, scored, torch.load(files["exact"]))
        print(f"{dtype}: the trainer with the engine's arithmetic: mean {found['mean']:g}, max {found['max']:g}; first: {found['first']}")
        print(f"  of {found['tokens']} tokens {found['equal']} are equal to the bit, {found['equal_before']} without it")
        print(f"  its gradient against the trainer's own: {found['gradient']:g}")
    return report


def agreement(sampled: list[dict[str, Any]], scored: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the trainer with the engine's arithmetic (`exact`) and without it (`scored`).

    Returns:
        As of `compare`, without the operations; tokens whose log-probabilities are the engine's to the bit, with and without;
        gradient: the relative difference of both gradients of the first response's cross entropy.
    """
    report = compare(sampled, exact)
    del report["operations"]
    engine, *trainers = ([value for one in side for value in one["logprobs"]] for side in (sampled, exact, scored))
    report["equal"], report["equal_before"] = (sum(a == b for a, b in zip(engine, side, strict=True)) for side in trainers)
    mine, own = exact[0]["gradient"], scored[0]["gradient"]
    return report | {"gradient": _short(float((mine - own).norm() / own.norm()))}


def main() -> None:
    """Both sides by dtype, a table of operations, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic-cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--exact", action="store_true", help="the trainer with the engine's arithmetic as well, on a CPU")
    parser.add_argument("--batch-invariant", action="store_true", help="vLLM's and Megatron's batch-invariant kernels, on a GPU")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, where in (("exact", "cpu"), ("batch_invariant", "cuda")):
        if getattr(options, name) and device != where:
            parser.error(f"--{name.replace('_', '-')} is for {where}; this is {device}")
    config = load(options.recipe, options.overrides)
    detail: dict[str, Any] = {"recipe": options.recipe, "device": device}
    with tempfile.TemporaryDirectory() as directory:
        model = prepare_model(config, Path(directory) / "model")
        prompts = draw(config, model, options.prompts)
        for dtype in options.dtypes:
            detail[dtype] = _of_dtype(model, dtype, prompts, options, directory)
    value = detail[options.dtypes[-1]]["mean"]
    assert math.isfinite(value)
    unit = f"mean |engine - trainer| log-probability, {options.dtypes[-1]}"
    print(json.dumps({"name": "precision", "value": value, "unit": unit, "detail": detail}))


if __name__ == "__main__":
    main()
