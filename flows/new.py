"""A recipe to begin with, for what one has: its file, and a reward function or an environment of one's own where one says so.

grpo-flows new sums                                                     generated sums, and a tiny model made up for them
grpo-flows new mine --data train.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --gpu
grpo-flows new mine --data train.parquet --reward own                   mine.yaml, mine_rewards.py
grpo-flows new mine --environment                                       mine.yaml, mine_environment.py

The first row of the data says which columns hold prompt and answer, and, unless --reward does, how answers are compared.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from configs.base import ConfigError
from configs.continuity import flat
from configs.loader import load
from flows.arguments import parse

_PROMPTS = ("prompt", "question", "problem", "instruction", "input", "messages")
_ANSWERS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "final_answer", "response", "output", "completion", "target")
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")  # names of sets, the first that is there
_SET = re.compile("|".join(("train", *_HELD_OUT)))  # how the name of a file begins
_MATHEMATICS = re.compile(r"\\boxed|####|^[\s$\\]*[-+]?\d[\d,./]*[\s$%]*$")

_RECIPE = """\
# {name}: written by `grpo-flows new`. What every setting is: grpo-flows recipes show {file} --resolved
#
#   grpo-flows run {file} --check      does all fit? starts nothing
#   grpo-flows run {file}              field=value after it changes a setting
name: {name}
seed: 0
steps: 100             # each trains on rollout.prompts_per_step x rollout.responses_per_prompt responses
validate_every: 10     # answers to the held-out prompts: before the first step, every so often, after the last

{model}
{environment}
{rewards}
rollout:
  prompts_per_step: {prompts}
  responses_per_prompt: 8   # of one prompt; each is compared with the others' mean
  max_new_tokens: {tokens}
  temperature: {temperature}
{rest}"""

_TINY = """\
model:                 # none was named: a tiny Qwen3 with a tokenizer of its own, trained from nothing
  hidden_size: 128
  intermediate_size: 384
  num_hidden_layers: 3
  num_attention_heads: 4
  num_key_value_heads: 2
  max_position_embeddings: 512   # prompt and response, in tokens
"""
_TINY_REST = """\
policy:
  batching: {micro_batch_size: 32}
  optimizer: {lr: 1.0e-4}
warm_start:            # supervised steps first, until it is right at times: a model that never is has nothing to learn from
  steps: 100
  batch_size: 32
  lr: 1.0e-3
  check_every: 10
  stop_at_accuracy: 0.3
"""
_TINY_TEMPERATURE = "0.5   # at 1 few responses are right of a tiny model whose likeliest answer often is"
_CPU_REST = """\
generation: {max_model_len: 1024}   # prompt and response, in tokens
policy:
  batching: {mode: packed, tokens_per_micro_batch: 2048}
  optimizer: {lr: 1.0e-6, warmup_steps: 5}
"""
_GPU_REST = """\
placement: colocated   # engine and trainer share the GPU
generation:
  executor: async
  dtype: bfloat16
  max_model_len: 1024  # prompt and response, in tokens
  max_num_seqs: 512
  kv_cache_gib: 8
  enforce_eager: false
policy:
  dtype: bfloat16
  batching: {mode: packed, tokens_per_micro_batch: 8192}
  optimizer: {lr: 1.0e-6, warmup_steps: 5}
  loss: {kl_coef: 0.001}
"""
_DATASET = """\
environment:
  kind: dataset
{files}
  fields: {{prompt: {prompt}, answer: {answer}}}   # columns; dots lead into nested ones
  on_too_long: drop    # or refuse, truncate
"""
_ONE_SET = """\
  path: {path}
  validation_size: 64  # the last different prompts are held out; or give validation_path
"""
_TWO_SETS = """\
  path: {path}
  validation_path: {held_out}
  validation_size: 64  # of them, the first
"""
_GENERATED = """\
environment:
  kind: reasoning_gym
  task: chain_sum      # over a hundred others; its own verifier is the reward
  task_options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  validation_size: 64
"""
_OWN_ENVIRONMENT = """\
environment:
  kind: python
  import_path: "{module}:MyEnvironment"   # {module}.py, in the directory in which the command is typed
"""
_REWARDS = {
    "math": "rewards:\n  - {kind: math}        # 1 when the final answer equals the data's, as mathematics\n",
    "exact": "rewards:\n  - {kind: exact}       # 1 when the response is the answer; `pattern` picks a part of it\n",
    "environment": "rewards:\n  - {kind: environment} # what MyEnvironment.score gives\n",
    "verifier": "",
}
_OWN_REWARD = """\
rewards:               # the first decides what is right (scoring.success); more may follow, each with a weight
  - {{kind: python, import_path: "{module}:reward"}}   # {module}.py, in the directory in which the command is typed
"""
_REWARD_CODE = '''\
"""Rewards of the recipe {name}."""


def reward(completions, answer, **columns):
    """One number for each completion; at least 1 counts as right, and the answers in the data must.

    It is called with one response at a time, in a process that is killed when it takes too long. The other columns of the data's row come
    by their names, each as a list. A completion is text; of a prompt that is a chat it is [{{"role": "assistant", "content": text}}].
    """
    return [1.0 if text_of(completion).strip().endswith(gold.strip()) else 0.0 for completion, gold in zip(completions, answer)]


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''
_ENVIRONMENT_CODE = '''\
"""The prompts of the recipe {name}, and what responses to them are worth."""

from actors.environments import Environment, Problem


class MyEnvironment(Environment):
    """Replace the sums by what you have. It lives in a process of its own; `environment.options` are its arguments."""

    def size(self, split):
        return 1000 if split == "train" else 64

    def problem(self, split, index):
        """The same problem for the same arguments; none of the validation split may be in the training split."""
        number = index if split == "train" else 1000 + index
        return Problem(uid=f"sum-{{number}}", question=f"{{number}} + 1 =", answer=str(number + 1))

    def score(self, problem, response):
        """A finite number, at least 1 for a right response; None: no opinion. Called in a process that is killed when it takes too long."""
        return 1.0 if response.strip() == problem.answer else 0.0
'''


@dataclass(frozen=True)
class _Source:
    """Where problems come from. `reward`: what suits their answers."""

    block: str
    reward: str


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 written, 2 wrong input."""
    options = parse("new", arguments)
    try:
        files = new(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    recipe = files[0]
    print("\n".join((f"wrote {', '.join(map(str, files))}", f"next  grpo-flows run {recipe} --check", f"      grpo-flows run {recipe}")))
    return 0


def new(options: argparse.Namespace) -> list[Path]:
    """Write the files. Returns them, the recipe first.

    Raises:
        ConfigError: a name that cannot be a run's, data that cannot be read, or a file that is there already.
    """
    name, module = options.name, re.sub(r"\W", "_", options.name)
    source = _source(options, f"{module}_environment")
    kind = options.reward or source.reward
    rewards = _OWN_REWARD.format(module=f"{module}_rewards") if kind == "own" else _REWARDS[kind]
    tiny = options.model is None
    recipe = _RECIPE.format(
        name=name, file=f"{name}.yaml", model=_TINY if tiny else _model(options.model), environment=source.block, rewards=rewards,
        prompts=16 if tiny or not options.gpu else 32, tokens=32 if tiny else 256,
        temperature=_TINY_TEMPERATURE if tiny else "1.0", rest=_GPU_REST if options.gpu and not tiny else _TINY_REST if tiny else _CPU_REST,
    )  # fmt: skip
    files = {f"{name}.yaml": recipe}
    if kind == "own":
        files[f"{module}_rewards.py"] = _REWARD_CODE.format(name=name)
    if options.environment:
        files[f"{module}_environment.py"] = _ENVIRONMENT_CODE.format(name=name)
    return _write(options.to, {file: re.sub(r"\n{3,}", "\n\n", text) for file, text in files.items()})


def _write(folder: Path, files: Mapping[str, str]) -> list[Path]:
    paths = [folder / name for name in files]
    if there := [path for path in paths if path.exists()]:
        raise ConfigError(f"{there[0]} exists already: nothing was written; give another name, or move it away")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text)
    try:
        load(str(paths[0]))
    except ConfigError:  # a name that no run can have
        for path in paths:
            path.unlink()
        raise
    return paths


def _source(options: argparse.Namespace, module: str) -> _Source:
    if options.environment:
        return _Source(_OWN_ENVIRONMENT.format(module=module), "environment")
    if options.data is None:
        return _Source(_GENERATED, "verifier")
    row = _first_row(options.data)
    columns = flat(row)
    prompt, answer = _column(row, columns, _PROMPTS, "prompt"), _column(row, columns, _ANSWERS, "answer")
    gold = str(row[answer] if answer in row else columns.get(answer, ""))
    train, held_out = _sets(options.data)
    sets = (_TWO_SETS if held_out else _ONE_SET).format(path=_scalar(train), held_out=_scalar(held_out))
    block = _DATASET.format(files=sets.rstrip(), prompt=_scalar(prompt), answer=_scalar(answer))
    return _Source(block, "math" if _MATHEMATICS.search(gold) else "exact")


def _sets(path: str) -> tuple[str, str]:
    """What to train on, and what to hold out: the files of a folder that are named so; else all of it, and nothing."""
    from actors.environments.dataset.rows import files

    named: dict[str, list[str]] = {}
    for file, _ in files(path, "--data"):
        found = _SET.match(PurePosixPath(file).name)
        named.setdefault(found[0] if found else "", []).append(file)
    held_out = next((name for name in _HELD_OUT if name in named), None)
    if held_out is None or "" in named or len({posixpath.dirname(one) for one in named.get("train", ())}) != 1:
        return path, ""
    return _glob("train", named["train"]), _glob(held_out, named[held_out])


def _glob(name: str, files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{posixpath.dirname(files[0])}/{name}*{PurePosixPath(files[0]).suffix}"


def _first_row(path: str) -> dict[str, Any]:
    from actors.environments.dataset.rows import files, read_table, reading  # pyarrow: not for those who ask for help

    with reading(path, "--data"):
        table = read_table(*files(path, "--data")[0])
        if not len(table):
            raise ConfigError(f"--data: {path} is empty: no rows to read")
        return table.row(0)


def _column(row: Mapping[str, Any], columns: Mapping[str, Any], usual: tuple[str, ...], what: str) -> str:
    """The first of the usual names that the row has.

    Raises:
        ConfigError: it has none.
    """
    found = next((name for name in usual if name in row or name in columns), None)
    if found is None:
        raise ConfigError(
            f"--data: none of the columns {', '.join(columns)} looks like the {what} ({', '.join(usual)}): write `fields` by hand "
            "(grpo-flows recipes show gsm8k-cpu has an example)"
        )
    return found


def _scalar(text: str) -> str:
    """The text as YAML has it inside a block or a flow."""
    return text if re.fullmatch(r"[A-Za-z./][\w./:+@-]*", text) else json.dumps(text)


def _model(given: str) -> str:
    package = "/" not in given and not Path(given).exists() and not given.endswith(".gguf")
    field = "gguf" if package or given.endswith(".gguf") else "path"
    return f"model: {{{field}: {_scalar(given)}}}   # path: a directory, a URL of one, or a hub id; gguf: a file, or a package with one\n"


if __name__ == "__main__":
    raise SystemExit(main())
