"""Writes a small Qwen3 model with a tokenizer of its own, in Hugging Face format: a model to train where none can be fetched.

texts ──► byte-level BPE tokenizer ─┐
ModelConfig + seed ──► weights ─────┴──► directory that transformers, vLLM and Megatron load
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config
from transformers.utils.logging import disable_progress_bar

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
    from transformers import Qwen3ForCausalLM  # seconds (torch's compiler comes along), and only a model from scratch needs it

    tokenizer = _train_tokenizer(texts, config)
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_qwen3(config, tokenizer))
    disable_progress_bar()  # one small file: a bar of transformers' own would only disturb the run's
    model.save_pretrained(directory)
    return directory


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
    )
