"""Model directories that cannot be trained are refused with the file and the remedy, without importing Megatron."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.models.hf import check_engine_reads, check_model_dir, head_dim, rope_scaling_factor, tensor_shapes, weight_files
from configs.base import ConfigError
from tests.actors.policy import tiny
from tests.patience import WAIT_S


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", "llama", tied=True, rope_parameters=tiny.LLAMA3_ROPE, max_position_embeddings=16384)


def edit(model: Path, **changes: Any) -> str:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(model)


def test_a_good_directory(model: Path) -> None:
    config = check_model_dir(str(model))
    assert (config.model_type, config.vocab_size, head_dim(config), rope_scaling_factor(config)) == ("llama", 96, 16, 8.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2'; supported are dense llama, qwen2, qwen3"),
        ({"attention_bias": True}, "config.json sets attention_bias"),
        ({"mlp_bias": True}, "config.json sets mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported is 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: give the unquantised model"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope scaling .*yarn.* is not supported"),
        ({"rope_parameters": tiny.LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "rope scaling .* is not supported"),
    ],
)
def test_unsupported_models(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_dir(edit(model, **changes))


def test_directories_that_lack_something(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere"):
        check_model_dir(str(model / "nowhere"))
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        check_model_dir(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no weights: model.safetensors is missing; .*save_pretrained"):
        check_model_dir(str(model))
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config.json"):
        check_model_dir(str(model))


def test_the_index_decides_which_files_are_the_weights(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "qwen2", tied=False, shard_size="40KB")
    whole = tiny.write_model(tmp_path / "whole", "qwen2", tied=False)
    parts = weight_files(model)
    assert len(parts) > 1
    (model / "consolidated.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    assert weight_files(model) == parts
    check_engine_reads(str(model))
    assert tensor_shapes(str(model)) == tensor_shapes(str(whole))
    parts[1].unlink()
    with pytest.raises(ConfigError, match=f"{parts[1].name} is missing"):
        check_model_dir(str(model))


def test_without_an_index_vllm_would_read_every_file(model: Path) -> None:
    check_engine_reads(str(model))
    (model / "adapter_model.safetensors").write_bytes(b"")
    assert len(weight_files(model)) == 1
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors beside model.safetensors"):
        check_engine_reads(str(model))


def test_checking_imports_no_megatron() -> None:
    script = "import sys, actors.models.hf; sys.exit('megatron' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)
