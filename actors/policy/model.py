"""A Megatron-Core GPTModel with the shape of a Hugging Face dense Llama, Qwen2 (Qwen2.5) or Qwen3 model."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from actors.models.hf import check_layout, head_dim, rope_scaling_factor
from actors.policy.cuda_graphs import MODEL_OPTIONS
from configs.base import ConfigError
from configs.policy import ParallelConfig

# It warns at every start that HybridModel succeeds GPTModel.
logging.getLogger(GPTModel.__module__).setLevel(logging.ERROR)


def transformer_config(
    hf: Any, parallel: ParallelConfig, dtype: torch.dtype, *, shapes_vary: bool = False, fused: bool = False, graphs: bool = False
) -> TransformerConfig:
    """Megatron's configuration of the model that `hf` (a transformers configuration) describes."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type == "qwen3",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        pipeline_dtype=dtype,
        variable_seq_lengths=shapes_vary,  # each message between stages is led by its shape
        moe_token_dispatcher_type="alltoall",  # there are no experts, but the default one forbids shapes that vary
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        perform_initialization=False,  # every parameter is loaded
        # Fused kernels exist for CUDA only, and change results in the last bits.
        bias_activation_fusion=fused,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,
        # Losses are sums divided by denominators of the whole batch, so gradients are summed, never averaged.
        calculate_per_token_loss=True,
        **(MODEL_OPTIONS if graphs else {}),
    )


def build_model(
    hf: Any, parallel: ParallelConfig, dtype: torch.dtype, device: torch.device, *, shapes_vary: bool = False, graphs: bool = False
) -> GPTModel:
    """This rank's part of the model, with weights not yet loaded. Needs Megatron's parallel groups.

    Args:
        shapes_vary: micro-batches of one call have shapes of their own (dynamic batching).
        graphs: passes will be captured as CUDA graphs.

    Raises:
        ConfigError: a layout that this model cannot be split into.
    """
    check_layout(parallel, hf)
    scaling = rope_scaling_factor(hf)
    fused = takes_transformer_engine(device, dtype)
    if parallel.context > 1 and not fused:
        raise ConfigError(
            f"policy.parallel.context is {parallel.context}: it needs Transformer Engine's attention, so a GPU, dtype bfloat16 or float16, "
            f"and the package transformer-engine (here: {device.type}, {dtype})"
        )
    model = GPTModel(
        config=transformer_config(hf, parallel, dtype, shapes_vary=shapes_vary, fused=fused, graphs=graphs),
        transformer_layer_spec=_block(hf, parallel, fused=fused),
        # Rounded up to what tensor parallelism can split evenly; the padding's logits never reach a softmax.
        vocab_size=-(-hf.vocab_size // parallel.tensor) * parallel.tensor,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=float(hf.rope_parameters["rope_theta"]),
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling or 8.0,
        parallel_output=True,
    )
    return model.to(device=device, dtype=dtype)


def takes_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are Transformer Engine's: it is there, and has fused attention for this device and dtype."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    return importlib.util.find_spec("transformer_engine") is not None


def _block(hf: Any, parallel: ParallelConfig, *, fused: bool) -> TransformerBlockSubmodules:
    # The block is spelled out because its default norm depends on what else is installed.
    qk_layernorm = hf.model_type == "qwen3"
    layer, norm = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm"), WrappedTorchNorm
    if fused:
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm), TENorm
    return TransformerBlockSubmodules(layer_specs=[layer] * (hf.num_hidden_layers // parallel.pipeline), layer_norm=norm)
