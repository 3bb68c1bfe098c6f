"""What a run will need of each GPU's memory, from shapes and settings alone: printed by --dry-run, and checked before anything starts.

policy worker   weights, gradients, optimizer, reference   by parameters of this rank (TP, PP; the optimizer over DP x CP as well)
                activations, logits                        by tokens of a micro-batch; one micro-batch is alive at a time
                refit                                      ipc: the buffer in which weights pass to engines; it stays
engine          weights, KV cache                          by the generation settings

An estimate: docs/gpu.md sets it beside what was measured.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from actors.models.hf import head_dim
from configs.base import ConfigError
from configs.policy import PolicyConfig
from configs.rollout import GenerationConfig

GIB = 2**30
# Libraries' workspaces, gradients on their way to the buffers, and what the allocator cannot use: measured as reserved memory above
# the other parts, 0.5 B shape, 512 to 8,192 tokens, with CUDA graphs.
WORKSPACE_BYTES = 1.4 * GIB
# The driver's share of each process, outside torch's allocator.
CONTEXT_BYTES = 0.5 * GIB
# Logits of one slice on one rank, with a gradient on CUDA: below 4 GiB in bfloat16 the backward pass keeps them; others are computed again.
CUDA_KEPT_ELEMENTS = 2**31
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes on one GPU, by part.
Parts = dict[str, float]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder; `query` and `key_value` are widths: heads x size of a head."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    query: int
    key_value: int
    vocab: int
    context: int
    tied: bool
    qk_norm: bool

    @classmethod
    def of(cls, hf: Any) -> ModelShape:
        """From a transformers configuration; or from the `ModelConfig` of a Qwen3 that the recipe makes up, with the largest vocabulary."""
        size = head_dim(hf)
        return cls(
            layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            intermediate=hf.intermediate_size,
            heads=hf.num_attention_heads,
            query=hf.num_attention_heads * size,
            key_value=hf.num_key_value_heads * size,
            vocab=hf.vocab_size,
            context=hf.max_position_embeddings,
            tied=bool(hf.tie_word_embeddings),
            qk_norm=getattr(hf, "model_type", "qwen3") == "qwen3",
        )

    def parameters(self, tensor: int = 1, pipeline: int = 1) -> float:
        """Of the fullest rank. Norms and biases, under 0.1 %, are left out.

        With a pipeline that is a stage with an embedding; tied weights then lie on the first and on the last stage.
        """
        attention = self.hidden * (2 * self.query + 2 * self.key_value)
        per_layer = (attention + 3 * self.hidden * self.intermediate) / tensor
        embeddings = self.vocab * self.hidden / tensor * (1 if self.tied or pipeline > 1 else 2)
        return self.layers / pipeline * per_layer + embeddings


def policy_memory(shape: ModelShape, policy: PolicyConfig, longest: int) -> Parts:
    """One worker's parts, on CUDA.

    Args:
        longest: most tokens of a sequence.
    """
    parallel, size = policy.parallel, _BYTES[policy.dtype]
    parameters = shape.parameters(parallel.tensor, parallel.pipeline)
    # Megatron's distributed optimizer: two moments in float32, and master weights where the model's are narrower.
    states = (8 if size == 4 else 12) / (parallel.data * parallel.context)
    tokens, row = (number / parallel.context for number in micro_batch_tokens(policy, longest))
    logits = min(tokens * shape.vocab / parallel.tensor, CUDA_KEPT_ELEMENTS)
    parts = {
        "weights": parameters * size,
        "gradients": parameters * 4,
        "optimizer": parameters * states,
        "reference": parameters * size if policy.loss.kl_coef > 0 else 0.0,
        # A pipeline's first stage has 1/PP of the layers, and holds the activations of PP micro-batches.
        "activations": tokens * shape.layers * _activations(shape, policy, row),
        "logits": logits * size,
        "workspace": WORKSPACE_BYTES + CONTEXT_BYTES,
    }
    return {name: value for name, value in parts.items() if value}


def ipc_memory(shape: ModelShape, policy: PolicyConfig, generation: GenerationConfig) -> Parts:
    """What a worker that sends its weights within the GPU's memory holds for that (`refit.ipc.SharedBuffer`)."""
    size = _BYTES[policy.dtype]
    largest = max(shape.vocab, shape.intermediate) * shape.hidden * size
    return {"refit": max(largest, min(shape.parameters() * size, generation.refit_buffer_mib * 2**20))}


def engine_memory(shape: ModelShape, generation: GenerationConfig) -> Parts:
    """One engine's parts on each of its GPUs. Its own CUDA graphs and workspaces are in none of them."""
    size = _BYTES.get(generation.dtype, 2)  # auto: the checkpoint's, which is rarely wider
    return {"weights": shape.parameters(generation.tensor_parallel_size) * size, "KV cache": generation.kv_cache_gib * GIB}


def micro_batch_tokens(policy: PolicyConfig, longest: int) -> tuple[int, int]:
    """Most tokens, padding included, that go through the model at once, and that lie in one row of them."""
    batching = policy.batching
    row = next((bucket for bucket in batching.token_buckets if bucket >= longest), longest)
    if batching.tokens_per_micro_batch is None:  # padded
        rows = next((bucket for bucket in batching.sequence_buckets if bucket >= batching.micro_batch_size), batching.micro_batch_size)
        return rows * row, row
    return batching.tokens_per_micro_batch, batching.tokens_per_micro_batch if batching.mode == "packed" else row


def render(parts: Parts) -> str:
    """One line: the total, then every part, in GiB."""
    listed = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items())
    return f"{sum(parts.values()) / GIB:.1f} GiB: {listed}"


def check_fits(parts: Parts, capacity: float, who: str, advice: str) -> None:
    """The parts fit a GPU of `capacity` bytes.

    Raises:
        ConfigError: they do not; with the parts, and `advice`.
    """
    if sum(parts.values()) > capacity:
        raise ConfigError(f"{who} would need {render(parts)}; the GPU has {capacity / GIB:.1f} GiB: {advice}")


def gpu_capacity() -> float | None:
    """Bytes of the smallest GPU of this machine; None where there is none. Without a CUDA context of this process."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(float(line) for line in found.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _activations(shape: ModelShape, policy: PolicyConfig, row: float) -> float:
    """Bytes per token and layer that the backward pass reads, without recomputation (counted as in arXiv 2205.05198, section 4.1).

    Transformer Engine's layers (bfloat16) keep inputs and outputs of both norms, the projections into attention, its output, both halves
    of the gated unit, and their product. Megatron's own attention (float32) keeps the projections once more, after the rotary embedding,
    and per head two rows of scores.
    """
    split: float = 2 * shape.query + 2 * shape.key_value + 3 * shape.intermediate + shape.qk_norm * (shape.query + shape.key_value)
    if policy.dtype == "float32":
        split += shape.query + 2 * shape.key_value + 2 * shape.heads * row
    return _BYTES[policy.dtype] * (4 * shape.hidden + split / policy.parallel.tensor)
