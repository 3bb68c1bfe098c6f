"""Wrong inputs, one of each kind, with words that the message must have. docs/messages.md is the table of them and of their messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.loader import RECIPES

RECIPE = (RECIPES / "arithmetic-cpu.yaml").read_text()
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
_INDEX = "model.safetensors.index.json"
_ROWS = "".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(300))


@dataclass(frozen=True)
class Wrong:
    """An input in a folder of its own.

    Attributes:
        what: for the table. words: what its message has. arguments: of `python -m flows.FLOW`.
        files: their contents by name; mine.yaml is then the recipe, unless the arguments name another.
        damage: what is done to a good model in the folder `model`.
    """

    what: str
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    damage: Callable[[Path], object] | None = None
    flow: str = "grpo"


def _override(argument: str, *words: str, recipe: str = "arithmetic-cpu", flow: str = "grpo") -> Wrong:
    return Wrong(f"`{argument}`", words, ("--recipe", recipe, argument), flow=flow)


def _file(what: str, content: str | bytes, *words: str) -> Wrong:
    return Wrong(what, ("mine.yaml", *words), files={"mine.yaml": content})


def _with(what: str, changes: dict[str, Any], *words: str, files: Mapping[str, str | bytes] | None = None) -> Wrong:
    """The recipe with other blocks."""
    return Wrong(what, words, files={"mine.yaml": yaml.safe_dump(yaml.safe_load(RECIPE) | changes), **(files or {})})


def _rows(what: str, rows: str, *words: str, **block: Any) -> Wrong:
    return _with(what, {"environment": {"kind": "dataset", "path": "data.jsonl", **block}}, *words, files={"data.jsonl": rows})


def _model(what: str, damage: Callable[[Path], object], *words: str) -> Wrong:
    recipe = yaml.safe_dump(yaml.safe_load(RECIPE) | {"model": {"path": "model"}})
    return Wrong(what, ("model.path", *words), files={"mine.yaml": recipe}, damage=damage)


def _says(name: str, **values: Any) -> Callable[[Path], object]:
    """Changes a JSON file."""
    return lambda model: (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | values))


def _code(what: str, code: str, *words: str, rewards: bool = False) -> Wrong:
    named = {"kind": "python", "import_path": "own:Units"}
    return _with(what, {"rewards": [named]} if rewards else {"environment": named}, *words, files={"own.py": code})


def _sft(what: str, data: str, *words: str, rows: str = '{"prompt": "1 + 1", "response": "2"}\n' * 9, more: str = "steps: 3") -> Wrong:
    recipe = f"flow: sft\nname: mine\n{more}\nmodel: {{max_position_embeddings: 64}}\ndata: {data}\n"
    return Wrong(what, words, files={"mine.yaml": recipe, "data.jsonl": rows}, flow="sft")


_CANNOT = "import_path: cannot import 'own:Units'"
_UNIT = "from actors.environments import Environment\nclass Units(Environment):\n"
_SIZED = "    def size(self, split): return 1 // self.x\n    def problem(self, split, i): ...\n"
_RAISES = "    def __init__(self):\n        raise KeyError('k')\n"

SECTIONS: dict[str, list[Wrong]] = {
    "The recipe's file": [
        Wrong("`--recipe missing.yaml`", ("there is no file missing.yaml", "arithmetic-cpu"), ("--recipe", "missing.yaml")),
        Wrong("`--recipe arithmetic-cpu.yml`", ("did you mean 'arithmetic-cpu'?",), ("--recipe", "arithmetic-cpu.yml")),
        Wrong("`--recipe arithmetik-cpu`", ("did you mean 'arithmetic-cpu'?",), ("--recipe", "arithmetik-cpu")),
        Wrong("a recipe of another flow", ("python -m flows.sft",), ("--recipe", "sft-cpu")),
        _file("a bracket that is not closed", "name: a\nsteps: [\n", "mine.yaml, line 3, column 1: not valid YAML"),
        _file("a list", "- a\n", "a recipe is a mapping of fields, this file holds list"),
        _file("an empty file", "", "a recipe is a mapping of fields, this file is empty"),
        _file("a Latin-1 file", "name: a\n# café\n".encode("latin-1"), "mine.yaml, line 2: not UTF-8 text"),
        _file("a block given twice", RECIPE + "policy: {updates_per_step: 1}\n", "'policy' is given twice, in lines "),
        _file("an alias that holds itself", "a: &a [*a]\n", "too many values"),
    ],
    "Names": [
        _file("`flow: GRPO`", RECIPE + "flow: GRPO\n", "flow: there is no flow 'GRPO'; did you mean 'grpo'? (line "),
        _override("flow=GRPO", "flow: there is no flow 'GRPO'; did you mean 'grpo'?"),
        _file("`stepz: 3`", RECIPE + "stepz: 3\n", "stepz: no such field; did you mean 'steps'? (line "),
        _file("`hiden_size`", RECIPE.replace("hidden_size:", "hiden_size:", 1), "model.hiden_size", "did you mean 'hidden_size'? (line 7)"),
        _override("Policy={}", "Policy: no such field; did you mean 'policy'?"),
        _override("policy.optimizer.xyz=1", "valid fields here: lr"),
        _override("rewards=[{kind: math, wait: 1}]", "did you mean 'weight'?"),
        _override("preset=dappo", "did you mean 'dapo'?"),
        _override("policy.loss.objective=grop", "no such objective; did you mean 'grpo'?"),
        _override("asynchronous.sampler=windowd", "no such sampler; did you mean 'windowed'?", recipe="arithmetic-cpu-async"),
        _override("policy.cuda_graph.enable_cuda_graph=true", "Megatron-Core has given this name up"),
        _override("num_generations=8", "did you mean 'rollout.responses_per_prompt'? (TRL)"),
        _override("actor_rollout_ref.rollout.n=8", "did you mean 'rollout.responses_per_prompt'? (verl)"),
        _override("policy.model_name=models/mine", "did you mean 'model.path'? (NeMo-RL)"),
        _override("data.train_files=train.parquet", "did you mean 'data.train'? (verl)", recipe="sft-cpu", flow="sft"),
    ],
    "Values": [
        _file("`steps: true`", RECIPE.replace("\nsteps: 170", "\nsteps: true"), "(got 'true') (line 4)"),
        _override("steps=true", "valid integer", "(got 'true')"),
        _override("steps=0", "greater than 0"),
        _override("steps=many", "valid integer", "(got 'many')"),
        _override("steps", "write field=value"),
        _override("steps=[1", "override steps: not valid YAML"),
        _override("model={hidden_size: 8, hidden_size: 9}", "override model: not valid YAML: 'hidden_size' is given twice"),
        _override("seed.deep=3", "'seed' is a value, not a block of fields"),
        _file("`name: latest`", RECIPE.replace("name: arithmetic-cpu", "name: latest"), "'latest' is the link", "(line 2)"),
        _override("output_dir=s3://bucket/runs", "output_dir: 's3://bucket/runs' is a URL", "checkpoint.url"),
        _override("name=a/b", "name: String should match pattern"),
        _override("policy.dtype=fp8", "use one of float32, bfloat16"),
        _override("mode=asinc", "did you mean 'async'?"),
        _override("generation.sleep_level=3", "use one of 0, 1, 2"),
        _override("rollout.temperature=-1", "greater than 0"),
        _override("rollout.responses_per_prompt=1", "a group of 1 has no baseline"),
        _override("environment.kind=jsonl", "use one of reasoning_gym, dataset, python"),
        _override("rewards=[{kind: maths}]", "rewards.0.kind: there is no 'maths'; did you mean 'math'?"),
        _override("rewards=[{kind: regex, pattern: '('}]", "no regular expression"),
        _override("environment={kind: python, import_path: mine.Units}", "package.module:Class"),
        _override("checkpoint.url=s3://me:secret@bucket/run", "a URL with a user or password"),
        _override(
            "rewards=[{kind: judge, url: 'http://127.0.0.1:1/v1', model: a, api_key: sk-123}]", "rewards.0.judge.api_key", "${env:NAME}"
        ),
    ],
    "What does not fit together": [
        _file(
            "a batch that does not divide",
            "name: a\nrollout:\n  prompts_per_step: 3\n  responses_per_prompt: 5\npolicy: {updates_per_step: 2}\n",
            "= 15 samples do not divide",
            "(lines 3, 4 and 5)",
        ),
        _file("`mode: async` alone", "name: a\nmode: async\n", "importance_sampling is none", "(line 2)"),
        _file("`min_lr` above `lr`", "name: a\npolicy:\n  optimizer:\n    lr: 1.0e-5\n    min_lr: 1.0\n", "min_lr (1)", "(lines 4 and 5)"),
        _override("policy.optimizer={decay_steps: 9}", "decay_style is 'constant'"),
        _override("policy.batching.mode=packed", "mode 'packed' needs tokens_per_micro_batch"),
        _override("policy.loss={surrogate: cispo, dual_clip: 3}", "dual_clip has no effect with surrogate cispo"),
        _override("policy.loss={kl_estimator: k2}", "kl_estimator has no effect with kl_coef 0"),
        _override("validation.samples_per_prompt=4", "rollout.validation_temperature is 0"),
        _override("model.hidden_size=130", "hidden_size (130) must divide by num_attention_heads"),
        _override("model.path=models/mine", "path is set, so the directory's config.json gives the shape"),
        _override("model={path: a, gguf: b}", "path and gguf are both set"),
        _override("rewards=[{kind: math}, {kind: math}]", "two are called 'math'"),
        _override("scoring.success=mat", "no reward is called 'mat'"),
        _override("rewards=[{kind: length, cache_tokens: 100}]", "is above rollout.max_new_tokens"),
        _override("data_plane.capacity_samples=8", "capacity_samples (8) is below the samples of a step"),
        _override(
            "environment={kind: dataset, path: a.jsonl, validation_path: a.jsonl}", "the prompts that measure the model would train it"
        ),
        _override("environment={kind: dataset, path: a.jsonl, streaming: true}", "the end of a stream cannot be held out"),
        _override("environment={kind: dataset}", "kind 'dataset' needs `path`"),
        _override("generation.max_model_len=4096", "is above the model's context"),
        _override("rollout.max_new_tokens=64", "leaves no room for a prompt"),
        _override("warm_start={stop_at_accuracy: 0.5}", "stop_at_accuracy needs steps above 0"),
    ],
    "The model's directory": [
        _with("no directory", {"model": {"path": "models/mine"}}, "model.path: there is no directory models/mine", "(mine.yaml, line "),
        _model("no config.json", lambda d: (d / "config.json").unlink(), "has no config.json"),
        _model("no tokenizer", lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer: tokenizer.json is needed"),
        _model("a damaged tokenizer", lambda d: (d / "tokenizer.json").write_text("{"), "no tokenizer can be loaded"),
        _model("no end token", _says("tokenizer_config.json", eos_token=None), "has no eos_token"),
        _model("a tokenizer of another model", _says("config.json", vocab_size=10), "take the tokenizer that belongs to this model"),
        _model("no weights", lambda d: (d / "model.safetensors").unlink(), "has no weights: model.safetensors is missing"),
        _model("damaged weights", lambda d: (d / "model.safetensors").write_bytes(b"\0" * 20), "model.safetensors cannot be read"),
        _model("weights as a git-lfs pointer", lambda d: (d / "model.safetensors").write_text(_POINTER), "git lfs pull"),
        _model("a tokenizer as a git-lfs pointer", lambda d: (d / "tokenizer.json").write_text(_POINTER), "git lfs pull"),
        _model("a config.json as a git-lfs pointer", lambda d: (d / "config.json").write_text(_POINTER), "git lfs pull"),
        _model("an index that is no JSON", lambda d: (d / _INDEX).write_text("{nope"), f"{_INDEX} is no index of weights: Invalid JSON"),
        _model("an index that is a list", lambda d: (d / _INDEX).write_text("[]"), f"{_INDEX} is no index of weights"),
        _model(
            "an index that names a missing file",
            lambda d: (d / _INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}})),
            "x.safetensors is missing",
        ),
        _model("a second file of weights", lambda d: (d / "b.safetensors").write_bytes(b""), "vLLM would load both"),
        _model("another kind of model", _says("config.json", model_type="gpt2"), "is of type 'gpt2'; supported are dense"),
        _model("a quantised model", _says("config.json", quantization_config={"quant_method": "awq"}), "give the unquantised model"),
    ],
    "Data": [
        _rows("no file", "", "environment.path", "there is no such file", "(mine.yaml, line ", path="train.jsonl"),
        _rows("an empty file", "", "environment.path: data.jsonl is empty"),
        _rows("a line that is no JSON", _ROWS + "{\n", "data.jsonl, line 301: not a JSON object"),
        _rows("a column that is not there", _ROWS, "no column 'question'", "environment.fields.prompt", fields={"prompt": "question"}),
        _rows("an answer that is null", _ROWS + '{"prompt": "a", "answer": null}\n', "data.jsonl, line 301", "is null"),
        _rows("an empty answer", _ROWS + '{"prompt": "a", "answer": " "}\n', "is empty: a response without a word would be right"),
        _rows("an empty prompt", _ROWS + '{"prompt": "", "answer": "1"}\n', "is empty: there is nothing to answer"),
        _rows(
            "a chat that has been answered",
            _ROWS + '{"prompt": [{"role": "assistant", "content": "hi"}], "answer": "1"}\n',
            "the chat must end with one of the user's",
        ),
        _rows("a prompt that is too long", _ROWS + json.dumps({"prompt": "1 + " * 200, "answer": "1"}) + "\n", "environment.on_too_long"),
        _rows("held-out data that are missing", _ROWS, "environment.validation_path", "no.jsonl", validation_path="no.jsonl"),
        _with(
            "a validation set that is missing",
            {"validation": {"sets": {"held": {"kind": "dataset", "path": "no.jsonl", "validation_path": "no.jsonl"}}}},
            "validation.sets.held",
        ),
        _override("environment.task=chain_sums", "chain_sum"),
        _override("environment.task_options={min_term: 1}", "has no option 'min_term'; did you mean 'min_terms'?"),
        _override("model.gguf=nothing.gguf", "gguf"),
    ],
    "Code of one's own": [
        _code("nothing of that name", "Unit = 1\n", _CANNOT, "did you mean 'Unit'?"),
        _code("a syntax error", "x = 1\ndef a(:\n", _CANNOT, "SyntaxError: invalid syntax", "own.py:2)"),
        _code("an import that fails", "x = 1\nimport nowhere\n", _CANNOT, "ModuleNotFoundError: No module named 'nowhere'", "own.py:2)"),
        _code("an error at import", "import json\njson.loads('{')\n", _CANNOT, "JSONDecodeError", "own.py:2)"),
        _code("an error of two lines", "raise ValueError('of two\\nlines')\n", _CANNOT, "ValueError: of two lines", "own.py:1)"),
        _code("a reward that does not import", "x = 1\nimport nowhere\n", _CANNOT, "own.py:2)", rewards=True),
        _code("a constructor that raises", _UNIT + _RAISES + _SIZED, "environment.import_path: KeyError: 'k'", "own.py:4)"),
        _code("an environment whose size raises", _UNIT + "    x = 0\n" + _SIZED, "ZeroDivisionError"),
    ],
    "`sft`": [
        _sft("no length of the run", "{train: data.jsonl, split: 0.2}", "set one of `steps` and `epochs`", more="seed: 1"),
        _sft("no data", "{split: 0.2}", "set one of `train` (a file) and `environment`"),
        _sft("no held-out data", "{train: data.jsonl}", "set one of `validation` (a file) and `split`"),
        _sft("a format that is not known", "{train: data.csv, split: 0.2}", "ends in none of .jsonl, .parquet"),
        _sft("a column that is not there", "{train: data.jsonl, split: 0.2, response_field: answer}", "has no field 'answer'"),
        _sft("an empty response", "{train: data.jsonl, split: 0.2}", "is empty", rows='{"prompt": "1", "response": ""}\n' * 9),
        _sft("one row to split", "{train: data.jsonl, split: 0.2}", "cannot be split", rows='{"prompt": "1", "response": "2"}\n'),
        _sft(
            "checkpoints beside validations",
            "{train: data.jsonl, split: 0.2}",
            "must be a multiple of validate_every",
            more="steps: 3\nvalidate_every: 2\ncheckpoint: {every_steps: 3}",
        ),
    ],
    "`evaluate` and `retrain`": [
        _override("model=no/model", "no/model", recipe="evaluate-cpu", flow="evaluate"),
        _override("sampling.temprature=1", "did you mean 'temperature'?", recipe="evaluate-cpu", flow="evaluate"),
        _override("promotion.metric=acuracy", "did you mean 'accuracy'?", recipe="retrain-cpu", flow="retrain"),
        _override("training.overrides=[stepz=3]", "stepz", recipe="retrain-cpu", flow="retrain"),
    ],
}
