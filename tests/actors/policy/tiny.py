"""Tiny random models in Hugging Face format, and batches for them."""

from pathlib import Path
from typing import Any

import torch
import transformers  # its models are imported by those who use one; actors of the tests import this module as well

from actors.data_plane.meta import KVBatchMeta

KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_model(directory: Path, kind: str, *, tied: bool, vocab: int = 96, shard_size: str = "1GB", **overrides: Any) -> Path:
    """Grouped-query attention, a head_dim that is not hidden / heads where the kind allows it, and every weight random (norms too)."""
    config_class, model_class = (getattr(transformers, f"{KINDS[kind]}{part}") for part in ("Config", "ForCausalLM"))
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if kind != "qwen2":
        shape["head_dim"] = 16
    torch.manual_seed(len(kind) + tied)
    model = model_class(config_class(**(shape | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def batch(seed: int, vocab: int, rows: int = 6, longest: int = 8) -> tuple[KVBatchMeta, dict[str, list[torch.Tensor]]]:
    """Rows of different lengths, of two sources and in pairs, with every column of a GRPO step but policy_logprobs and reference_logprobs.

    Prompts have 2 to 7 tokens, responses 3 to `longest`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    columns: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "advantages")
    }
    prompts, lengths = [], []
    for row in range(rows):
        prompt, response = draw(2, 8), draw(3, longest + 1)
        mask = torch.arange(prompt + response) >= prompt
        columns["input_ids"].append(torch.randint(0, vocab, (prompt + response,), generator=generator))
        columns["token_mask"].append(mask)
        columns["sample_mask"].append(torch.tensor(0.0 if row == 1 else 1.0))
        columns["generation_logprobs"].append(torch.where(mask, -3 * torch.rand(len(mask), generator=generator), 0.0))
        columns["advantages"].append(torch.randn((), generator=generator))
        prompts.append(prompt)
        lengths.append(prompt + response)
    meta = KVBatchMeta(
        partition_id="train",
        task_name="test",
        keys=tuple(f"k{row}" for row in range(rows)),
        sequence_lengths=tuple(lengths),
        tags=tuple(
            {
                "response_length": length - prompt,
                "source": "ab"[row % 2],
                "reward": float(row % 3 == 0),
                "pair": row // 2,
                "chosen": row % 2 == 0,
            }
            for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True))
        ),
    )
    return meta, columns
