"""Saving a policy's state beside training: how long training stands still, how fast the files are written, how fast they are loaded.

One worker trains on a small batch. Each save copies masters and moments to host memory (training stands still) and writes them to a
directory while steps go on; the last one is loaded again, and the steps after it are repeated. On CUDA the 0.5 B shape (a state of
6 GB), otherwise one of 83 M parameters in float32 (1 GB).
`value` is the longest standstill in ms: at most 1,000 on a CPU, at most 500 on an H200. `detail`: MB/s of writing, seconds to load,
train steps with and without a save beside them, and whether the repeated steps were equal to the bit.

    .venv/bin/python -m benchmarks.checkpoint [--shape 1gb|0.5b|smollm2-135m|tiny] [--saves 3] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from configs import settings

settings.apply_defaults()

import torch  # noqa: E402  (after the settings: they are read at import)

from actors.data_plane.in_memory import MemoryPlane  # noqa: E402
from actors.data_plane.sharding import ShardPlan  # noqa: E402
from actors.policy.worker import PolicyWorker  # noqa: E402
from benchmarks import train_step  # noqa: E402
from configs.policy import PolicyConfig  # noqa: E402

SHAPES = train_step.SHAPES | {
    "1gb": {
        "kind": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
        "num_key_value_heads": 12, "vocab_size": 35000, "tie_word_embeddings": True,
    },
}  # fmt: skip
CASE = train_step.Case("padded", 16, 16)
WRITE_S = 120.0  # longest wait for one save


def main() -> None:
    """Save, load, and print the result."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b" if cuda else "1gb")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the states go; default: a temporary directory")
    options = parser.parse_args()
    train_step.SHAPES.update(SHAPES)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        model = train_step.write_model(Path(directory) / "model", options.shape, CASE.length, cuda)
        detail = measure(str(model), Path(directory), options.saves, cuda)
    value = detail.pop("standstill_ms")
    print(json.dumps({"name": "checkpoint", "value": value, "unit": "ms", "detail": {"shape": options.shape} | detail}))


def measure(model: str, directory: Path, saves: int, cuda: bool) -> dict[str, Any]:
    """Of one worker: `saves` saves with steps beside them, and the last one loaded."""
    config = PolicyConfig(batching=CASE.batching(), dtype="bfloat16" if cuda else "float32", recompute_logprobs="always")
    plane = MemoryPlane()
    worker = PolicyWorker(config, model, 0, plane, seed=0, temperature=1.0)
    worker.setup(f"file://{directory}/rendezvous")
    plan = train_step.batch(plane, CASE, "checkpoint").shards[0]
    alone = [timed_step(worker, plan)[0] for _ in range(2)][1:]
    started = time.perf_counter()
    worker.prepare_save()
    prepare_s = time.perf_counter() - started
    rows = [shown(save(worker, plan, directory / f"state-{number}")) for number in range(saves)]
    last = directory / f"state-{saves - 1}"
    size = sum(path.stat().st_size for path in last.iterdir())
    started = time.perf_counter()
    worker.load_state(str(last), config.optimizer)
    load_s = time.perf_counter() - started
    again = [timed_step(worker, plan)[1] for _ in rows[-1]["losses"]]
    worker.close()
    return {
        "standstill_ms": max(row["standstill_ms"] for row in rows),
        "state_mb": round(size / 1e6),
        "write_mb_per_s": round(size / 1e6 / statistics.median(row["write_s"] for row in rows)),
        "load_s": round(load_s, 2),
        "load_mb_per_s": round(size / 1e6 / load_s),
        "prepare_s": round(prepare_s, 2),
        "step_ms": round(min(alone) * 1e3, 1),
        "step_beside_ms": round(statistics.median(step for row in rows for step in row["step_ms"]), 1),
        "equal": again == rows[-1]["losses"],
    }


def save(worker: PolicyWorker, plan: ShardPlan, directory: Path) -> dict[str, Any]:
    """One save, with steps until it is written."""
    started = time.perf_counter()
    worker.begin_save(str(directory))
    standstill = time.perf_counter() - started
    steps = [timed_step(worker, plan)]
    while worker.is_saving():
        if time.perf_counter() - started > WRITE_S:
            raise TimeoutError(f"{directory} was not written within {WRITE_S:g} s")
        steps.append(timed_step(worker, plan))
    results, seconds = worker.save_results()
    worker.finish_save(str(directory), [results], weight_version=1)
    return {
        "standstill_ms": round(standstill * 1e3, 1),
        "write_s": round(seconds, 3),
        "step_ms": [round(step * 1e3, 1) for step, _ in steps],
        "losses": [loss for _, loss in steps],
    }


def timed_step(worker: PolicyWorker, plan: ShardPlan) -> tuple[float, float]:
    """Seconds and loss of one optimizer step."""
    started = time.perf_counter()
    loss = worker.train(plan, "grpo")["loss"]
    return time.perf_counter() - started, loss


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed."""
    print("  ".join(f"{name} {value}" for name, value in row.items() if name != "losses"), flush=True)
    return row


if __name__ == "__main__":
    main()
