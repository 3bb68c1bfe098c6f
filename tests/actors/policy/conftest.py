"""Models and layouts shared by the parity tests: one spawn per layout goes through all jobs, as starting processes is what costs."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.models.scratch_model import write_scratch_model
from configs.model import ModelConfig
from configs.policy import ParallelConfig
from tests.actors.policy import tiny
from tests.actors.policy.program import Job, run_layout

LAYOUTS = {
    "TP1": ParallelConfig(),
    "TP2": ParallelConfig(tensor=2),
    "PP2": ParallelConfig(pipeline=2),
    "TP2xPP2": ParallelConfig(tensor=2, pipeline=2),
    "DP2": ParallelConfig(data=2),
}
# 97 tokens do not divide by 2: tensor parallelism pads the vocabulary.
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {"kind": "llama", "tied": True, "rope_parameters": tiny.LLAMA3_ROPE, "max_position_embeddings": 16384},
    "llama-untied": {"kind": "llama", "tied": False},
    "qwen2-tied": {"kind": "qwen2", "tied": True, "shard_size": "40KB"},
    "qwen2-untied": {"kind": "qwen2", "tied": False, "vocab": 97},
    "qwen3-tied": {"kind": "qwen3", "tied": True, "vocab": 97},
    "qwen3-untied": {"kind": "qwen3", "tied": False, "tie_word_embeddings": False},
}
# eps well above float32 noise in the gradients: Adam would turn noise around 0 into full steps.
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}
GRPO = {
    "optimizer": OPTIMIZER | {"clip_grad": 0.5},
    "loss": {"kl_coef": 0.1, "clip_low": 0.02, "clip_high": 0.03},
    "recompute_logprobs": "always",
}
CORRECTED = GRPO | {"loss": {"importance_sampling": "token", "importance_cap": 2.0, "max_sequence_logprob_error": 3.5, "entropy_coef": 0.3}}
MIXTURE = GRPO | {
    "loss": {
        "kl_coef": 0.1,
        "kl_gradient": "corrected",
        "sources": {"b": {"policy_gradient_coef": 0, "kl_coef": 1, "cross_entropy_coef": 0.5}},
    }
}
PREFERRED = {"optimizer": OPTIMIZER | {"clip_grad": 0.5}, "loss": {"objective": "dpo", "dpo_beta": 0.3}}
OWN = "tests.actors.policy.objectives.own"
DISTILLED = ("logprob", "candidates", "grpo", "grpo", "export")
GRPO_STEPS = ("snapshot", "logprob", "reference", "grpo", "grpo", "grpo", "export")
BATCHING = {mode: {"mode": mode, "tokens_per_micro_batch": 64} for mode in ("dynamic", "packed")}
BUCKETED = {"micro_batch_size": 2, "token_buckets": [16, 24]}
GRAPHS = {"device": "auto", "cuda_graph": {"impl": "full_iteration"}}
SFT = {"optimizer": OPTIMIZER | {"clip_grad": 0.0}, "batching": {"micro_batch_size": 3}}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: tiny.write_model(root / name, **options) for name, options in MODELS.items()}
    paths["teacher"] = tiny.write_model(root / "teacher", "llama", tied=False, vocab=97, hidden_size=48, num_hidden_layers=2, head_dim=12)
    texts = [f"{i} + {i + 1} = {2 * i + 1}" for i in range(50)]
    shape = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64)
    paths["scratch"] = write_scratch_model(root / "scratch", shape, texts, seed=0)
    return paths


@pytest.fixture(scope="session")
def results(models: dict[str, Path]) -> Any:
    """`results(layout)`: what every rank returned for every job of the layout; run at the first call."""

    @cache
    def run(layout: str) -> dict[str, list[dict[str, Any]]]:
        jobs = [
            *_parity(models, layout),
            *_training(models),
            *_layouts(models, layout),
            *_taught_by_source(models, layout),
            *_masters(models, layout),
            *_single(models, layout),
        ]
        return run_layout(LAYOUTS[layout], jobs)

    return run


def _parity(models: dict[str, Path], layout: str) -> list[Job]:
    names = MODELS if layout != "DP2" else ["llama-untied"]
    return [Job(name, str(models[name]), ("logprob", "export"), vocab=MODELS[name].get("vocab", 96)) for name in names]


def _training(models: dict[str, Path]) -> list[Job]:
    return [
        Job("grpo", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO),
        Job("corrected", str(models["qwen3-tied"]), ("logprob", "grpo", "export"), vocab=97, policy=CORRECTED),
        Job("distilled", str(models["qwen3-tied"]), ("logprob", "reference", "grpo", "export"), vocab=97, policy=_taught(models)),
        Job("distilled-top", str(models["qwen3-tied"]), DISTILLED, vocab=97, policy=_taught_exactly(models, 5)),
        Job("dpo", str(models["qwen3-tied"]), ("grpo", "grpo", "evaluate", "export"), vocab=97, policy=PREFERRED),
        Job("mixture", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=MIXTURE),
        Job("sft", str(models["qwen2-untied"]), ("sft", "sft", "sft", "export"), vocab=97, policy=SFT),
    ]


def _taught(models: dict[str, Path]) -> dict[str, Any]:
    """On-policy distillation from a model of another family and size."""
    loss = {"policy_gradient_coef": 0, "kl_coef": 1, "kl_gradient": "corrected"}
    return GRPO | {"loss": loss, "teacher": {"path": str(models["teacher"])}}


def _taught_exactly(models: dict[str, Path], top_k: int | str, **options: Any) -> dict[str, Any]:
    """From the distributions over the teacher's candidates."""
    teacher = {"path": str(models["teacher"]), "top_k": top_k}
    return GRPO | {"loss": {"policy_gradient_coef": 0, "kl_coef": 1}, "teacher": teacher} | options


def _taught_by_source(models: dict[str, Path], layout: str) -> list[Job]:
    """Responses of source b by a teacher of their own; the others by another, or by none."""
    if layout == "TP2xPP2":
        return []
    own = {"top_k": 5, "sources": {"b": str(models["qwen2-untied"])}}
    teachers = {"two": own | {"path": str(models["teacher"])}, "one": own}
    actions = {"two": ("candidates", "grpo", "export"), "one": ("candidates",)}
    common = GRPO | {
        "loss": {"policy_gradient_coef": 0, "kl_coef": 1, "sources": {"a": {"kl_coef": 0.5}}},
        "batching": BATCHING["packed"],
        "recompute_logprobs": "auto",
    }
    return [
        Job(f"{name}-taught", str(models["qwen3-tied"]), actions[name], vocab=97, policy=common | {"teacher": teacher})
        for name, teacher in teachers.items()
    ]


def _layouts(models: dict[str, Path], layout: str) -> list[Job]:
    if layout == "TP2xPP2":
        return []
    jobs = [
        Job(f"grpo-{mode}", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO | {"batching": batching})
        for mode, batching in BATCHING.items()
    ]
    if layout in ("TP1", "TP2"):
        whole = {"full": "full", "dynamic": 5, "packed": 5}
        jobs += [
            Job(
                f"distilled-{name}", str(models["qwen3-tied"]), DISTILLED, vocab=97,
                policy=_taught_exactly(models, k, **({"batching": BATCHING[name]} if name in BATCHING else {})),
            )
            for name, k in whole.items()
        ]  # fmt: skip
    return jobs


def _masters(models: dict[str, Path], layout: str) -> list[Job]:
    qwen3 = {"model": str(models["qwen3-tied"]), "vocab": 97, "distributed": layout == "DP2"}
    bfloat16 = {"dtype": "bfloat16", "optimizer": {"lr": 1e-3}}
    jobs = [
        Job("masters-bfloat16", actions=("state", "export"), policy=bfloat16, **qwen3),
        Job("masters-float32", actions=("state",), **qwen3),
    ]
    if layout != "TP1":
        again = ("round",) if layout in ("TP2", "PP2") else ()
        actions = ("sft", "sft", "working", "state", *again)
        return [*jobs, Job("chance", actions=actions, policy=bfloat16 | {"rounding": "stochastic"}, **qwen3)]
    steps = {"step": ("sft", "export"), "rounded-step": ("round masters", "sft", "export")}
    steps |= {"trained": ("sft", "state"), "reset": ("sft", "reset", "state")}
    return jobs + [Job(f"masters-{name}", actions=actions, policy=bfloat16, **qwen3) for name, actions in steps.items()]


def _single(models: dict[str, Path], layout: str) -> list[Job]:
    """Jobs that one layout is enough for."""
    llama, on_policy = str(models["llama-untied"]), {"optimizer": OPTIMIZER}
    if layout == "DP2":
        return [Job("poison", llama, ("poison", "export"), policy=on_policy)]
    if layout == "PP2":
        return [Job("independent", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO | {"fetch": "independent"})]
    if layout == "TP2":
        return [
            Job("independent", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO | {"fetch": "independent"}),
            Job("unreadable", llama, ("clear", "sft", "export"), policy=on_policy),
            Job("vanish", llama, ("vanish", "sft"), policy=on_policy),  # the last: a rank ends
        ]
    if layout != "TP1":
        return []
    return [
        Job("sft-guarded", str(models["qwen2-untied"]), ("sft", "guarded", "sft", "guarded", "sft", "export"), vocab=97, policy=SFT),
        Job("sft-warmed", str(models["qwen2-untied"]), ("warm_up", "sft", "sft", "sft", "export"), vocab=97, policy=SFT),
        Job("grpo-again", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO),
        Job("one-micro-batch", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO | {"batching": {"micro_batch_size": 6}}),
        Job("bucketed", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO | {"batching": BUCKETED}),
        Job("graphs", str(models["qwen3-tied"]), GRPO_STEPS, vocab=97, policy=GRPO | {"batching": BUCKETED} | GRAPHS),
        Job("retried", llama, ("logprob", "logprob")),
        Job("missing", llama, ("grpo",), policy=on_policy | {"recompute_logprobs": "always"}),
        Job("moved", llama, ("snapshot", "grpo", "reference", "logprob", "export"), policy=on_policy),
        Job("reset", llama, ("sft", "sft", "reset", "sft", "sft", "sft", "sft", "lower", "sft"), policy={"optimizer": {"lr": 1e-3}}),
        Job("reset-distributed", llama, ("sft", "reset", "sft"), policy={"dtype": "bfloat16"}, distributed=True),
        Job("reset-by-chance", llama, ("sft", "reset", "sft"), policy={"dtype": "bfloat16", "rounding": "stochastic"}),
        Job("own", llama, ("grpo", "grpo", "export"), policy=on_policy | {"loss": {"objective": f"{OWN}:FilteredImitation"}}),
        Job("save", str(models["scratch"]), ("sft", "save", "export"), policy=on_policy),
        Job("bfloat16-warmed", llama, ("warm_up", "sft", "sft", "export"), policy={"dtype": "bfloat16", "optimizer": {"lr": 1e-2}}),
        Job("bfloat16-cold", llama, ("sft", "sft", "export"), policy={"dtype": "bfloat16", "optimizer": {"lr": 1e-2}}),
        Job("bfloat16", llama, ("logprob", "sft", "sft", "export"), policy={"dtype": "bfloat16", "optimizer": {"lr": 1e-2}}),
    ]
