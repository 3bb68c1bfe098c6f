"""The model that both sides start from, as a Hugging Face directory. In a process of its own, which gives
the GPU's memory back.

python -m benchmarks.peers.weights random|float32|bfloat16 DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.preflight import prepare_model
from benchmarks import gpu_run
from benchmarks.peers.trl_side import RECIPE
from configs.loader import load


def write(kind: str, target: Path) -> None:
    """random: of SmolLM2-135M's shape, bfloat16; float32: SmolLM2's own, as the GGUF file gives them; bfloat16: those rounded."""
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        if kind == "random":
            made = Path(gpu_run.write_model(Path(place), "smollm2-135m", 2048))
        else:
            made = Path(shutil.copytree(prepare_model(load(RECIPE), Path(place) / "model"), Path(place) / "copy"))  # others read that
        if kind == "bfloat16":
            rounded, made = made, Path(place) / "rounded"
            AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.bfloat16).save_pretrained(made)
            AutoTokenizer.from_pretrained(rounded).save_pretrained(made)
        made.rename(target)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
