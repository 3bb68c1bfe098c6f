"""What a run learns by precision: SmolLM2 learns sums (recipe smollm2-135m-1gpu) in one of these ways, from the same weights.

    bfloat16-rounded      from the checkpoint rounded to bfloat16, as published ones are: masters begin on the grid
    bfloat16              masters begin at the checkpoint's float32 numbers
    bfloat16-stochastic   from the rounded checkpoint, the working copy rounded by chance (policy.rounding)
    float16, float16-rounded, float32, and float32-rounded: policy and engine in that dtype (float32 in padded rows and without CUDA
                          graphs: packed ones are a mask over the whole row there, which takes more memory than a GPU has)

`value` is the mean training reward of steps 31 to 50; `first` the first step with a training reward of 0.5. A run that is there already, in
the same --output, is only read: a later call goes on where this one was stopped. `--table` prints all that were made.

    .venv/bin/python -m benchmarks.precision_runs VARIANT [--seeds 0] [--steps 100] [--output runs/precision] [--table] [field=value ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.preflight import prepare_model
from benchmarks.staleness import curve, watch
from configs.loader import load

RECIPE = "smollm2-135m-1gpu"
PADDED = ("policy.batching={mode: padded, micro_batch_size: 32}", "policy.cuda_graph.impl=none")
VARIANTS: dict[str, tuple[bool, str, tuple[str, ...]]] = {  # from rounded weights, dtype, further overrides
    "bfloat16-rounded": (True, "bfloat16", ()),
    "bfloat16": (False, "bfloat16", ()),
    "bfloat16-stochastic": (True, "bfloat16", ("policy.rounding=stochastic",)),
    "float16": (False, "float16", ()),
    "float16-rounded": (True, "float16", ()),
    "float32": (False, "float32", PADDED),
    "float32-rounded": (True, "float32", PADDED),
}


def models(output: Path) -> dict[bool, Path]:
    """The recipe's model, and its copy whose weights are bfloat16 numbers, by whether they are rounded. Written once."""
    exact, rounded = Path(prepare_model(load(RECIPE), output / "model")), output / "model-rounded"
    if not rounded.is_dir():
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output) as place:
            made = shutil.copytree(exact, Path(place) / "model", ignore=shutil.ignore_patterns("*.safetensors"))
            weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(exact / "model.safetensors").items()}
            save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
            with suppress(OSError):  # another variant's process was first
                made.rename(rounded)
    return {False: exact, True: rounded}


def run(variant: str, seed: int, steps: int, output: Path, overrides: list[str]) -> dict[str, Any]:
    """One run, and what it learned. One that has come to its last step is not made again."""
    rounded, dtype, extra = VARIANTS[variant]
    name = f"{variant}-seed{seed}"
    if max(curve(output / name, "reward/mean"), default=0) < steps:
        fields = [
            f"seed={seed}", f"name={name}", f"output_dir={output}", f"steps={steps}", f"model={{path: {models(output)[rounded]}}}",
            f"policy.dtype={dtype}", f"generation.dtype={dtype}", *extra, *overrides,
        ]  # fmt: skip
        watch(name, [sys.executable, "-m", "flows.grpo", "--recipe", RECIPE, *fields], output, None)
    return row(output / name)


def row(directory: Path) -> dict[str, Any]:
    """What a run learned."""
    reward, accuracy = curve(directory, "reward/mean"), curve(directory, "accuracy/validation")
    error, seconds = curve(directory, "logprob_error/mean"), curve(directory, "time/train")
    later = [value for step, value in reward.items() if 31 <= step <= 50]
    return {
        "steps": max(reward, default=0),
        "first": next((step for step, value in reward.items() if value >= 0.5), None),
        "reward_31_50": round(statistics.fmean(later), 3) if later else None,
        "accuracy": round(accuracy[max(accuracy)], 3) if accuracy else None,
        "logprob_error_step_1": round(error[1], 5) if 1 in error else None,
        "train_s": round(statistics.median(seconds.values()), 3) if seconds else None,
        "skipped_steps": sum(curve(directory, "skipped_steps").values()),
    }


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown, a line for each run."""
    names = list(next(iter(rows.values())))
    lines = [f"| run | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(str(found[column]) for column in names)} |" for name, found in rows.items()]


def main() -> None:
    """Make the runs of one variant and print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/precision"))
    parser.add_argument("--table", action="store_true", help="of all runs in the folder, this one's included")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run ends too
    output = options.output.absolute()
    rows = {f"{options.variant}-seed{seed}": run(options.variant, seed, options.steps, output, options.overrides) for seed in options.seeds}
    if options.table:
        rows |= {path.name: row(path) for path in sorted(output.iterdir()) if (path / "metrics.jsonl").is_file()}
    print("\n".join(table(rows)))
    found = [rows[f"{options.variant}-seed{seed}"]["reward_31_50"] for seed in options.seeds]
    value = None if None in found else round(statistics.fmean(found), 3)
    unit = f"mean training reward, steps 31-50, {options.variant}"
    print(json.dumps({"name": "precision_runs", "value": value, "unit": unit, "detail": rows}))


if __name__ == "__main__":
    main()
