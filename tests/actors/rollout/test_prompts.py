"""Data order is a seeded permutation per epoch, and the scratch tokenizer frames question and answer."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments import Problem
from actors.policy.scratch import write_scratch_model
from actors.rollout.prompts import PromptEncoder, PromptStream, data_order
from configs.base import ConfigError
from configs.model import ModelConfig
from tests.actors.environments.parrot import Parrot

SMALL = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=300)
TEXTS = ["What is 12 + 7 = 19", "What is 3 - 45 = -42"]


@given(size=st.integers(1, 40), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_every_epoch_visits_every_problem_once(size: int, seed: int, epochs: int) -> None:
    drawn = list(islice(data_order(size, seed), size * epochs))
    assert drawn == list(islice(data_order(size, seed), size * epochs))
    assert Counter(drawn) == Counter({(epoch, index): 1 for epoch in range(epochs) for index in range(size)})


def test_uids_stay_unique_over_epochs() -> None:
    stream = PromptStream(Parrot(words=["a", "b", "c"]), seed=0)
    uids = [uid for uid, _ in stream.draw(10)]
    assert len(set(uids)) == 10
    assert stream.position == 10


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    path = write_scratch_model(tmp_path_factory.mktemp("scratch"), SMALL, TEXTS, seed=0)
    return PromptEncoder(str(path), None)


def test_scratch_tokenizer_frames_and_round_trips(encoder: PromptEncoder) -> None:
    problem = Problem(uid="0", question="What is 12 + 7 = ", answer="19")
    prompt, answer = encoder.prompt(problem), encoder.answer(problem)
    tokens = encoder.tokenizer.convert_ids_to_tokens(prompt)
    assert (tokens[0], tokens[-1]) == ("<|user|>", "<|assistant|>")
    assert answer[-1] == encoder.tokenizer.eos_token_id
    assert encoder.text(answer) == "19"
    assert len(answer) == 3  # each digit is a token of its own
    assert encoder.text(prompt) == problem.question


@given(text=st.text(max_size=30))
def test_any_text_round_trips_through_the_scratch_tokenizer(encoder: PromptEncoder, text: str) -> None:
    assert encoder.text(encoder.tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_scratch_model(tmp_path / name, SMALL, TEXTS, seed)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a/model.safetensors").read_bytes() != (tmp_path / "c/model.safetensors").read_bytes()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 100 is below 260"):
        write_scratch_model(tmp_path, SMALL.model_copy(update={"vocab_size": 100}), TEXTS, 0)
