"""Writes a small Qwen3 model with a tokenizer of its own, in Hugging Face format: a model to train where none can be fetched.

texts ──► byte-level BPE tokenizer ─┐
ModelConfig + seed ──► weights ─────┴──► directory that transformers, vLLM and Megatron load
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from configs.base import ConfigError
from configs.model import ModelConfig

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
_SPECIALS = [PAD, END, USER, ASSISTANT]
_SMALLEST_VOCABULARY = 256 + len(_SPECIALS)  # every byte has a token, so no text is unknown
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    + USER
    + "{{ message['content'] }}"
    + ASSISTANT
    + "{% elif message['role'] == 'assistant' %}{{ message['content'] }}"
    + END
    + "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def write_scratch_model(directory: Path, config: ModelConfig, texts: Iterable[str], seed: int) -> Path:
    """Write config.json, model.safetensors (fp32) and the tokenizer. The same arguments give the same bytes.

    Args:
        texts: what the tokenizer is trained on: the task's own questions and answers.

    Raises:
        ConfigError: `model.vocab_size` is below the 260 that bytes and special tokens need.
    """
    if config.vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"model.vocab_size: {config.vocab_size} is below {_SMALLEST_VOCABULARY} (256 bytes and {len(_SPECIALS)} special tokens)"
        )
    tokenizer = _train_tokenizer(texts, config)
    tokenizer.save_pretrained(directory)
    shape = _qwen3(config, tokenizer)
    shape.save_pretrained(directory)
    GenerationConfig.from_model_config(shape).save_pretrained(directory)
    save_file(_first_weights(shape, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@torch.no_grad()
def _first_weights(shape: Qwen3Config, seed: int) -> dict[str, torch.Tensor]:
    """By name, what transformers' Qwen3ForCausalLM(shape) begins with: its numbers are drawn in the same order (modeling_utils.py:
    `PreTrainedModel._init_weights`). Importing that class takes seconds, as torch's compiler comes along.
    """
    width, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    asked, kept = shape.num_attention_heads * head, (shape.num_key_value_heads or shape.num_attention_heads) * head
    linear = {  # of a layer: inputs, outputs
        "self_attn.q_proj": (width, asked),
        "self_attn.k_proj": (width, kept),
        "self_attn.v_proj": (width, kept),
        "self_attn.o_proj": (asked, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }
    norms = {
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
        "input_layernorm": width,
        "post_attention_layernorm": width,
    }
    layers = [f"model.layers.{index}." for index in range(shape.num_hidden_layers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Modules draw twice, as there: when they are made, and all once more when the decoder is complete.
        modules: dict[str, torch.nn.Embedding | torch.nn.Linear] = {
            "model.embed_tokens": torch.nn.Embedding(shape.vocab_size, width, shape.pad_token_id),
            **{layer + name: torch.nn.Linear(*sizes, bias=False) for layer in layers for name, sizes in linear.items()},
        }
        for module in modules.values():
            module.weight.normal_(0.0, shape.initializer_range)
        if not shape.tie_word_embeddings:
            modules["lm_head"] = torch.nn.Linear(width, shape.vocab_size, bias=False)
            modules["lm_head"].weight.normal_(0.0, shape.initializer_range)
    modules["model.embed_tokens"].weight[shape.pad_token_id].zero_()
    ones = {layer + name: size for layer in layers for name, size in norms.items()} | {"model.norm": width}
    weights = {name: module.weight.detach() for name, module in modules.items()} | {name: torch.ones(size) for name, size in ones.items()}
    return {f"{name}.weight": weight for name, weight in weights.items()}


def _train_tokenizer(texts: Iterable[str], config: ModelConfig) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    # Digits stand alone: the model sees place values, not arbitrary groups.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def _qwen3(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        **config.model_dump(exclude={"path", "gguf", "vocab_size"}),
        vocab_size=-(-len(tokenizer) // 8) * 8,  # divides by any tensor-parallel size up to 8
        head_dim=config.hidden_size // config.num_attention_heads,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )
