"""What one process holds of a GPU's memory, part by part, from shapes and settings alone. memory_plan.py puts processes beside each other.

policy worker   stays       weights, gradients, masters and moments, reference, refit buffer, context; with CUDA graphs their pool
                passes      activations, logits, gradients of single weights on their way to the buffers: one micro-batch at a time
engine          awake       weights, KV cache, activations and sampler
                always      its CUDA graphs, context

Constants that no shape gives were fitted to what an H100 held (docs/gpu.md, "Memory"); `python -m benchmarks.memory` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.models.hf import check_teacher_dir, head_dim, teacher_field
from actors.models.source import known_model
from configs.policy import PolicyConfig
from configs.rollout import GenerationConfig

GIB = 2**30
# Logits of one slice on one rank, with a gradient on CUDA: below 4 GiB in bfloat16 the backward pass keeps them; others are computed again.
CUDA_KEPT_ELEMENTS = 2**31
# Without a gradient: 512 MiB in bfloat16, and still a large matrix product.
CUDA_SLICE_ELEMENTS = 2**28

# What a process holds outside torch's allocator: CUDA context, kernels that were loaded, communicators of one rank. A worker holds less
# until its first update. A bare context is 0.6 GiB.
WORKER_CONTEXT, WORKER_CONTEXT_AT_START = 2.44 * GIB, 1.15 * GIB
ENGINE_CONTEXT = 0.75 * GIB
# A communicator of NCCL that has more than one rank: its channels' buffers.
COMMUNICATOR = 0.3 * GIB
# Parts that torch's allocator does not see.
OUTSIDE_TORCH = ("context", "communicators")
# Workspaces of cuBLAS and Transformer Engine, and small tensors.
WORKSPACE = 0.13 * GIB
# What torch's allocator holds beyond the tensors of a pass: unused ends of blocks, and a part of the pass; where micro-batches differ in
# their shapes, also blocks of sizes that came before.
UNUSED_ENDS = 0.2 * GIB
HOLES, HOLES_IF_SHAPES_VARY = 0.03, 0.35
# vLLM: a CUDA graph, per layer and captured size.
GRAPH_OF_LAYER = 0.27 * 2**20
# vLLM's sampler: float32 copies of the logits that are alive at once (logits, scaled, probabilities, log-probabilities).
SAMPLER_COPIES = 4
# vLLM: tokens of a step, where neither a server nor an LLM object says more (SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS).
ENGINE_TOKENS = 2048
# Bytes of a token that a teacher names at a position, while a pass is over them: number and log-probability in the micro-batch and among
# the labels, the policy's log-probability, and what its backward pass keeps (counted from logprob.py: 8 + 4 + 8 + 4, and 8 + 8 + 4 + 4).
CANDIDATE = 48
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes on one GPU, by part. A part of 0 bytes is left out.
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

    @property
    def embedding(self) -> int:
        """Elements of the embedding, which no other weight exceeds."""
        return self.vocab * self.hidden

    def parameters(self, tensor: int = 1, pipeline: int = 1) -> float:
        """Of the fullest rank. Norms and biases, under 0.1 %, are left out.

        With a pipeline that is a stage with an embedding; tied weights then lie on the first and on the last stage.
        """
        attention = self.hidden * (2 * self.query + 2 * self.key_value)
        per_layer = (attention + 3 * self.hidden * self.intermediate) / tensor
        embeddings = self.embedding / tensor * (1 if self.tied or pipeline > 1 else 2)
        return self.layers / pipeline * per_layer + embeddings

    def cache_bytes(self, dtype: str, tensor: int = 1) -> float:
        """Of the keys and values of one token."""
        return 2 * self.layers * self.key_value / tensor * _BYTES.get(dtype, 2)


def worker_stays(shape: ModelShape, policy: PolicyConfig) -> Parts:
    """What a worker holds from its first update on, whatever it does. Without refit buffers.

    Raises:
        ConfigError: policy.teacher cannot be read.
    """
    parallel, size = policy.parallel, _BYTES[policy.dtype]
    parameters = shape.parameters(parallel.tensor, parallel.pipeline)
    replicas = parallel.data * parallel.context  # Megatron's distributed optimizer
    return _parts(
        weights=parameters * size,
        gradients=parameters * 4,
        masters=0.0 if size == 4 else parameters * 4 / replicas,
        moments=parameters * 8 / replicas,
        reference=sum(one.parameters(parallel.tensor, parallel.pipeline) for one in _references(shape, policy)) * size,
        workspace=WORKSPACE,
        context=WORKER_CONTEXT,
        communicators=COMMUNICATOR * sum((replicas > 1, parallel.tensor > 1, parallel.pipeline > 1, parallel.context > 1)),
    )


def _references(shape: ModelShape, policy: PolicyConfig) -> list[ModelShape]:
    """The models beside the policy: a copy of its weights, or its teachers, each once."""
    if policy.why_no_ref_logprob():
        return []
    if policy.teacher is None:
        return [shape]
    found = {path: check_teacher_dir(known_model(path, teacher_field(source)), source) for source, path in policy.teacher.models.items()}
    return [ModelShape.of(one) for one in found.values()]


def training_pass(shape: ModelShape, policy: PolicyConfig, tokens: float, row: float) -> Parts:
    """What forward and backward pass of a micro-batch add, on the fullest rank.

    Args:
        tokens: of a micro-batch, padding included. row: of them, in one row.
    """
    parallel, size = policy.parallel, _BYTES[policy.dtype]
    tokens, row = tokens / parallel.context, row / parallel.context
    layers = tokens * shape.layers * _activations(shape, policy, row)
    logits = min(tokens * shape.vocab / parallel.tensor, CUDA_KEPT_ELEMENTS) * size
    if parallel.pipeline > 1:
        # The first stage has 1/PP of the layers, of PP micro-batches at once, and no logits; the last has one micro-batch and its logits.
        last = layers / parallel.pipeline
        layers, logits = (layers, 0.0) if layers > last + logits else (last, logits)
    holes = HOLES_IF_SHAPES_VARY if shapes_vary(policy) else HOLES
    # Of tied weights the output layer's gradient waits for the embedding's.
    embedding = shape.embedding / parallel.tensor * size
    return _parts(**{
        "activations": layers,
        "logits": logits,
        "teacher's candidates": tokens * _candidates(shape, policy) * CANDIDATE,
        "gradients on their way": embedding,
        "allocator's holes": UNUSED_ENDS + holes * (layers + logits),
    })  # fmt: skip


def logprob_pass(shape: ModelShape, policy: PolicyConfig, tokens: float) -> Parts:
    """What a pass without gradient adds: a layer's tensors, and a slice of the logits."""
    parallel, size = policy.parallel, _BYTES[policy.dtype]
    tokens /= parallel.context
    layer = tokens * (4 * shape.hidden + (3 * shape.intermediate + 2 * shape.query + 2 * shape.key_value) / parallel.tensor) * size
    logits = min(tokens * shape.vocab / parallel.tensor, CUDA_SLICE_ELEMENTS) * size
    return _parts(**{
        "activations": layer,
        "logits": logits,
        "teacher's candidates": tokens * _candidates(shape, policy) * CANDIDATE,
        "swap": shape.embedding / parallel.tensor * size if policy.keeps_reference else 0.0,
    })  # fmt: skip


def _candidates(shape: ModelShape, policy: PolicyConfig) -> int:
    return 0 if policy.teacher is None else policy.teacher.candidates(shape.vocab)


def candidate_bytes(shape: ModelShape, policy: PolicyConfig, tokens: int) -> int:
    """Bytes of the columns in which a teacher names so many tokens' candidates: a number and a log-probability of each."""
    return tokens * _candidates(shape, policy) * 8


def ipc_buffer(shape: ModelShape, policy: PolicyConfig, generation: GenerationConfig) -> float:
    """Bytes from which engines on the worker's GPU copy the weights; kept from the first refit on (`refit.ipc.SharedBuffer`)."""
    size = _BYTES[policy.dtype]
    largest = max(shape.vocab, shape.intermediate) * shape.hidden * size
    return max(largest, min(shape.parameters() * size, generation.refit_buffer_mib * 2**20))


def nccl_buffer(shape: ModelShape, policy: PolicyConfig, generation: GenerationConfig) -> float:
    """Bytes that are broadcast at once; taken for a refit (`refit.nccl`)."""
    size = _BYTES[policy.dtype]
    return min(generation.refit_buffer_mib * 2**20 + shape.embedding * size, shape.parameters() * size)


def gathered_weight(shape: ModelShape, policy: PolicyConfig) -> float:
    """Bytes of the largest weight, which a refit gathers from the ranks that share it."""
    split = policy.parallel.tensor > 1 or policy.parallel.pipeline > 1
    return shape.embedding * _BYTES[policy.dtype] if split else 0.0


def engine_awake(shape: ModelShape, generation: GenerationConfig) -> Parts:
    """What an engine gives back when it sleeps, on each of its GPUs."""
    size, tensor = _BYTES.get(generation.dtype, 2), generation.tensor_parallel_size  # auto: the checkpoint's, which is rarely wider
    tokens = max(ENGINE_TOKENS, generation.max_num_seqs)
    layer = tokens * (4 * shape.hidden + (3 * shape.intermediate + 2 * shape.query + 2 * shape.key_value) / tensor) * size
    return _parts(**{
        "weights": shape.parameters(tensor) * size,
        "KV cache": generation.kv_cache_gib * GIB,
        "activations": layer,
        "sampler": generation.max_num_seqs * shape.vocab * 4 * SAMPLER_COPIES,
    })  # fmt: skip


def engine_always(shape: ModelShape, generation: GenerationConfig) -> Parts:
    """What an engine holds asleep, too."""
    sizes = 0 if generation.enforce_eager else captured_sizes(generation.max_num_seqs)
    return _parts(
        graphs=sizes * shape.layers * GRAPH_OF_LAYER,
        context=ENGINE_CONTEXT,
        communicators=COMMUNICATOR * (generation.tensor_parallel_size > 1),
    )


def engine_bytes(shape: ModelShape, generation: GenerationConfig) -> float:
    """What an engine that is awake holds."""
    return sum(engine_awake(shape, generation).values()) + sum(engine_always(shape, generation).values())


def share_of_gpu(shape: ModelShape, generation: GenerationConfig, total: float) -> float:
    """The part of a GPU of `total` bytes that an engine takes once its process has a context, within vLLM's bounds for it."""
    return min(1.0, max(0.01, round((engine_bytes(shape, generation) - ENGINE_CONTEXT) / total, 4)))


def captured_sizes(sequences: int) -> int:
    """How many batch sizes vLLM captures: 1, 2, 4, multiples of 8 up to 256 and of 16 up to 512, none above twice `sequences`."""
    most = min(2 * sequences, 512)
    return sum(size <= most for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)))


def micro_batch_tokens(policy: PolicyConfig, longest: int) -> tuple[int, int]:
    """Most tokens, padding included, that go through the model at once, and that lie in one row of them.

    Args:
        longest: most tokens of a sequence.
    """
    batching = policy.batching
    row = next((bucket for bucket in batching.token_buckets if bucket >= longest), longest)
    if batching.tokens_per_micro_batch is None:  # padded
        rows = next((bucket for bucket in batching.sequence_buckets if bucket >= batching.micro_batch_size), batching.micro_batch_size)
        return rows * row, row
    return batching.tokens_per_micro_batch, batching.tokens_per_micro_batch if batching.mode == "packed" else row


def tokens_beside_graphs(policy: PolicyConfig, longest: int) -> int:
    """Most tokens of a micro-batch that runs eagerly, to warm up its shape, while the pool of the graphs captured before is there."""
    batching, (most, row) = policy.batching, micro_batch_tokens(policy, longest)
    if batching.mode != "padded" and len(batching.sequence_buckets) > 1:
        return most  # another number of sequences in as many tokens
    smaller = [bucket for bucket in batching.token_buckets if bucket < row]
    return smaller[-1] * (most // row) if smaller else 0


def shapes_vary(policy: PolicyConfig) -> bool:
    """Whether micro-batches come in many shapes."""
    return policy.batching.mode != "padded" and not policy.batching.token_buckets


def _parts(**sizes: float) -> Parts:
    return {name: value for name, value in sizes.items() if value}


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
