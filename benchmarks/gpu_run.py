"""What the benchmarks of whole runs on GPUs share: random models of real shapes, a run's actors without Prefect, and memory in use."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from actors import names
from actors.preflight import prepare_model
from actors.rollout.ledger_actor import ClaimReply
from actors.rollout.ledger_types import Claim
from actors.waiting import find, wait
from benchmarks import train_step
from configs import settings
from configs.loader import load
from configs.run import RunConfig
from tasks.handles import RunActors
from tasks.launch import launch, logical_gpus, stop

NAMESPACE = "benchmark-gpu"
SHAPES = train_step.SHAPES


def write_model(directory: Path, shape: str, longest: int) -> str:
    """Random bfloat16 weights of a shape, and the small tokenizer of the arithmetic recipe. Returns the directory.

    Its configuration names no end token: vLLM would stop at that by itself.
    """
    tokenizer = prepare_model(load("arithmetic-cpu"), directory / "tokenizer")
    values = dict(SHAPES[shape])
    kinds: dict[str, Any] = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    make, cls = kinds[values.pop("kind")]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = cls(
            make(**values, max_position_embeddings=longest, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16")
        )
    model.to(torch.bfloat16).save_pretrained(directory / "model")
    for file in Path(tokenizer).glob("*token*"):
        shutil.copy(file, directory / "model")
    del model
    torch.cuda.empty_cache()
    return str(directory / "model")


@contextmanager
def running(config: RunConfig, model: str) -> Iterator[RunActors]:
    """The actors of a run in a Ray of its own."""
    ray.init(
        address="local", num_cpus=16, num_gpus=logical_gpus(config), object_store_memory=2**30, include_dashboard=False,
        log_to_driver=False, namespace=NAMESPACE, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        actors = launch.fn(config, model, NAMESPACE)
        for name, line in actors.ready.items():
            print(f"{name}: {line}", flush=True)
        try:
            yield actors
        finally:
            stop(NAMESPACE, actors.address)
    finally:
        ray.shutdown()


def ask(actor: str, method: str, *arguments: Any, timeout_s: float = 600) -> Any:
    """Call a method of a named actor and wait."""
    return wait(getattr(find(actor, NAMESPACE), method).remote(*arguments), who=actor, what=method, timeout_s=timeout_s)


def rollout(version: int, groups: int) -> tuple[Claim, dict[str, float]]:
    """The groups that the loop answers once the version is announced, and its report of them. `begin_generating` comes before the first."""
    ask(names.LEDGER, "set_version", version)
    reply: ClaimReply = ask(names.LEDGER, "claim", groups, 600.0)
    assert reply.claim is not None, reply.log
    return reply.claim, ask(names.COLLECTOR, "report").metrics


def never_end(engines: Sequence[str]) -> None:
    """Let no token end a response, so that each has its full length."""

    def forget(actor: Any) -> None:
        actor._eos = ()

    ray.get([ray.get_actor(name, namespace=NAMESPACE).__ray_call__.remote(forget) for name in engines], timeout=60)


class Memory:
    """The largest use of each GPU that CUDA may see, as the driver counts it (all processes), looked at 20 times a second."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}
        self._now: dict[str, int] = {}
        command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "50"]
        if gpus := settings.get("CUDA_VISIBLE_DEVICES"):
            command.append(f"--id={gpus}")
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                gpu, used = line.split(",")
                self._now[gpu] = int(used)
                self._largest[gpu] = max(self._largest.get(gpu, 0), int(used))

    def peak_gib(self) -> float:
        """Of any GPU, since the last call of one of these two, or the beginning. 0 without nvidia-smi."""
        return max(self.peaks_gib().values(), default=0.0)

    def peaks_gib(self) -> dict[str, float]:
        """Of each GPU, by its number."""
        largest, self._largest = self._largest, {}
        return {gpu: round(used / 1024, 2) for gpu, used in sorted(largest.items())}

    def now_gib(self) -> dict[str, float]:
        """In use at the last look, by GPU."""
        return {gpu: round(used / 1024, 2) for gpu, used in sorted(self._now.items())}

    def close(self) -> None:
        """End the look-out."""
        if self._process is not None:
            self._process.terminate()


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each key."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
