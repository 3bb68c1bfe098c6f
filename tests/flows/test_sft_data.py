"""From files to columns: what is read, how it is split and shuffled, which tokens carry the loss, and what errors name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from actors.data_plane.in_memory import MemoryPlane
from actors.environments import Problem
from actors.models.scratch_model import write_scratch_model
from actors.policy.objectives.sft import Sft
from actors.rollout.examples import build_problems, read_rows, split_rows
from actors.rollout.prompts import PromptEncoder, PromptStream
from actors.rollout.supervised import SampleReader, SampleTooLongError, SupervisedBatches, TokenSample
from configs.base import ConfigError
from configs.model import ModelConfig
from configs.policy import PolicyConfig
from configs.sft import SupervisedDataConfig
from tests.actors.policy.objectives.batches import loss_of, micro_batch

ROWS = [("1 + 2", "3"), ("zwölf", "twelve"), ("two\nlines", " spaces ")]


def read(url: str) -> list[tuple[str, str]]:
    return [(row.question, row.answer) for row in read_rows(url, "prompt", "response", "data.train")]


def jsonl(path: Path, *lines: Any) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def rows(*texts: tuple[str, str]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "response": response} for prompt, response in texts]


# ---- reading ----


def test_lines_of_json_by_path_and_by_url(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *rows(*ROWS[:2]), "\n", *rows(ROWS[2]))
    assert read(path) == read(f"file://{path}") == ROWS
    assert [row.uid for row in read_rows(path, "prompt", "response", "data.train")] == [f"{path}:{line}" for line in (1, 2, 4)]
    with fsspec.open("memory://sft/rows.jsonl", "wb") as file:
        file.write(Path(path).read_bytes())
    assert read("memory://sft/rows.jsonl") == ROWS


def test_rows_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows(*ROWS)), path, row_group_size=2)
    assert read(str(path)) == read(f"file://{path}") == ROWS


def test_no_other_column_of_parquet_is_read(tmp_path: Path) -> None:
    """The pages of a third column are overwritten: who reads them fails."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "notes": "x" * 100} for row in rows(*ROWS)]), path)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(2)
    start = column.dictionary_page_offset or column.data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * column.total_compressed_size)
    with pytest.raises(OSError):
        parquet.read_table(path)
    assert read(str(path)) == ROWS


def test_fields_of_other_names(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", {"question": "q", "answer": "a", "id": 7})
    (row,) = read_rows(path, "question", "answer", "data.train")
    assert (row.question, row.answer) == ("q", "a")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "p", "response": "r"}\n', "{oops\n"], ["rows.jsonl, line 2", "not a JSON object"]),
        (["[1]\n"], ["rows.jsonl, line 1", "list"]),
        (["\n", '{"prompt": "p", "responce": "r"}\n'], ["data.response_field", "line 2", "'response'", "did you mean 'responce'"]),
        (['{"response": "r", "x": 1}\n'], ["data.prompt_field", "line 1", "'prompt'", "it has response, x"]),
        (['{"prompt": "p", "response": 3}\n'], ["line 1", "'response'", "int", "text is wanted"]),
        (['{"prompt": null, "response": "r"}\n'], ["line 1", "'prompt'", "NoneType"]),
        (['{"prompt": "p", "response": ""}\n'], ["line 1", "'response'", "empty"]),
        (["\n \n"], ["data.train", "rows.jsonl", "is empty"]),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(jsonl(tmp_path / "rows.jsonl", *lines))
    for word in words:
        assert word in str(caught.value)


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "p", "response": "r"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2"):
        read(str(tmp_path / "rows.jsonl"))


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "response": ["c", None]}), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet, row 2: field 'response' is NoneType"):
        read(str(path))
    parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": ["c"]}), path)
    with pytest.raises(ConfigError, match=r"data\.response_field: .*rows\.parquet has no field 'response'; it has prompt, answer"):
        read(str(path))
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"data\.train: cannot read .*rows\.parquet"):
        read(str(path))


@pytest.mark.parametrize("url", ["nowhere.jsonl", "memory://nowhere.jsonl", "nosuch://bucket/rows.jsonl", "nowhere.parquet"])
def test_a_file_that_is_not_there(url: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: cannot read .*(nowhere|nosuch)"):
        read(url)


# ---- splitting ----


@given(size=st.integers(2, 60), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 2**31))
def test_a_split_is_a_partition_that_keeps_the_order(size: int, fraction: float, seed: int) -> None:
    problems = [Problem(str(i), f"q{i}", f"a{i}") for i in range(size)]
    train, validation = split_rows(problems, fraction, seed)
    assert (train, validation) == split_rows(problems, fraction, seed)
    assert sorted([*train, *validation], key=lambda row: int(row.uid)) == problems
    for part in (train, validation):
        assert part
        assert [int(row.uid) for row in part] == sorted(int(row.uid) for row in part)
    assert len(validation) == min(max(1, round(fraction * size)), size - 1)


def test_another_seed_holds_out_other_rows() -> None:
    problems = [Problem(str(i), "q", "a") for i in range(100)]
    assert len({tuple(row.uid for row in split_rows(problems, 0.1, seed)[1]) for seed in range(5)}) == 5


def test_one_file_split_and_two_files(tmp_path: Path) -> None:
    many = jsonl(tmp_path / "many.jsonl", *rows(*((f"q{i}", f"a{i}") for i in range(20))))
    few = jsonl(tmp_path / "few.jsonl", *rows(ROWS[0]))
    data = build_problems(SupervisedDataConfig(train=many, split=0.25), seed=3)
    assert (data.size("train"), data.size("validation")) == (15, 5)
    data = build_problems(SupervisedDataConfig(train=many, validation=few), seed=3)
    assert (data.size("train"), data.size("validation")) == (20, 1)
    assert data.problem("validation", 0).question == "1 + 2"
    with pytest.raises(ConfigError, match=r"data\.split: .* has 1 row"):
        build_problems(SupervisedDataConfig(train=few, split=0.5), seed=3)


# ---- tokens ----


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    shape = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return PromptEncoder(str(write_scratch_model(tmp_path_factory.mktemp("m"), shape, ["Calculate 3 + 4.", "7"], seed=0)), None)


class Numbers:
    """Problem i asks for a number of i digits."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, split: str) -> int:
        return self._size

    def problem(self, split: str, index: int) -> Problem:
        return Problem(f"{split}:{index}", f"{index}?", "7" * (index + 1))


class Samples(SampleReader):
    """The reader together with the stream that it draws from."""

    def __init__(self, encoder: PromptEncoder, size: int, longest: int, on_too_long: Any, seed: int = 0) -> None:
        super().__init__(encoder, longest, on_too_long)
        self.stream = PromptStream(Numbers(size), seed)

    def next(self, count: int) -> list[TokenSample]:
        return self.draw(self.stream, count)


def test_prompt_and_response_are_the_rollouts_tokens_and_end_with_the_end_token(encoder: PromptEncoder) -> None:
    (sample,) = SampleReader(encoder, 100, "error").read_all([Problem("u", "Calculate 3 + 4.", "7 + 0")])
    tokenizer = encoder.tokenizer
    messages = [{"role": "user", "content": "Calculate 3 + 4."}]
    assert list(sample.prompt) == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(sample.response) == [*tokenizer.encode("7 + 0", add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode([*sample.prompt, *sample.response]) == "<|user|>Calculate 3 + 4.<|assistant|>7 + 0<|end|>"


def test_without_a_chat_template_the_prompt_ends_with_a_newline(encoder: PromptEncoder, tmp_path: Path) -> None:
    encoder.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    plain = PromptEncoder(str(tmp_path), None)
    (sample,) = SampleReader(plain, 100, "error").read_all([Problem("u", "3 + 4", "7")])
    assert plain.tokenizer.decode([*sample.prompt, *sample.response]) == "3 + 4\n7<|end|>"


@example(size=3, cut=2, seed=2, batches=[3])  # drops at the end of an epoch and at the start of the next
@given(size=st.integers(1, 12), cut=st.integers(0, 12), seed=st.integers(0, 99), batches=st.lists(st.integers(1, 7), max_size=6))
def test_every_epoch_holds_each_sample_that_fits_once(encoder: PromptEncoder, size: int, cut: int, seed: int, batches: list[int]) -> None:
    lengths = [len(encoder.prompt(p)) + len(encoder.answer(p)) for p in (Numbers(size).problem("train", i) for i in range(size))]
    longest = max(lengths) - cut
    fitting = {i for i, length in enumerate(lengths) if length <= longest}
    samples = Samples(encoder, size, longest, "drop", seed)
    if not fitting:
        with pytest.raises(SampleTooLongError, match=f"each of the {size} training samples"):
            samples.next(1)
        return
    drawn = [tuple(map(int, sample.uid.split("."))) for count in batches for sample in samples.next(count)]
    assert len(drawn) == sum(batches)
    assert {index for _, index in drawn} <= fitting
    epochs = [Counter(index for epoch, index in drawn if epoch == number) for number in range(-(-len(drawn) // len(fitting)))]
    assert all(epoch == Counter(fitting) for epoch in epochs[:-1])
    assert samples.dropped >= (len(epochs) - 1) * (size - len(fitting))
    again = Samples(encoder, size, longest, "drop", seed)
    assert [sample.uid for count in batches for sample in again.next(count)] == [f"{epoch}.{index}" for epoch, index in drawn]


def test_a_sample_that_is_too_long_is_named_with_both_numbers(encoder: PromptEncoder) -> None:
    samples = Samples(encoder, 1, 5, "error")
    with pytest.raises(SampleTooLongError, match=r"train:0: 6 tokens with the response, at most 5 are allowed.*on_too_long=drop"):
        samples.next(1)


# ---- columns ----


def test_pairs_are_two_rows_each(encoder: PromptEncoder, tmp_path: Path) -> None:
    url = jsonl(
        tmp_path / "pairs.jsonl",
        {"prompt": "1 + 1", "response": "2", "worse": "31"},
        {"prompt": "2 + 2", "response": "4", "worse": "5"},
        {"prompt": "3", "response": "3", "worse": "99999999"},
    )
    problems = read_rows(url, "prompt", "response", "data.train", "worse")
    reader = SampleReader(encoder, 10, "drop")
    samples = list(reader.read_all(problems))
    assert (len(samples), reader.dropped) == (2, 1)  # the worse response of the last is too long
    plane = MemoryPlane()
    meta = SupervisedBatches(plane, "train").put(samples, "batch 1", multiple_of=3)
    assert [(tag.get("pair"), tag.get("chosen")) for tag in meta.tags] == [
        (0, True),
        (0, False),
        (1, True),
        (1, False),
        (None, None),
        (None, None),
    ]
    assert len(set(meta.keys)) == 6
    columns = plane.get(meta, ["input_ids", "token_mask", "sample_mask"])
    for row, text in enumerate(("2", "31", "4", "5")):
        ids, mask = columns["input_ids"][row], columns["token_mask"][row]
        assert encoder.text(ids[mask].tolist()) == text
        assert ids[~mask].tolist() == list(samples[row // 2].prompt)
        assert meta.tags[row]["response_length"] == int(mask.sum())
        assert meta.sequence_lengths[row] == len(ids)
    assert [float(weight) for weight in columns["sample_mask"]] == [1, 1, 1, 1, 0, 0]
    with pytest.raises(ConfigError, match=r"data\.rejected_field: .* has no field 'wrose'; did you mean 'worse'"):
        read_rows(url, "prompt", "response", "data.train", "wrose")
    empty = jsonl(tmp_path / "empty.jsonl", {"prompt": "1", "response": "2", "worse": ""})
    with pytest.raises(ConfigError, match="field 'worse' is empty: there is nothing to learn from it"):
        read_rows(empty, "prompt", "response", "data.train", "worse")


def test_columns_of_a_batch_and_of_its_fillers(encoder: PromptEncoder) -> None:
    plane = MemoryPlane()
    samples = Samples(encoder, 9, 100, "error", seed=4)
    drawn = samples.next(5)
    meta = SupervisedBatches(plane, "train").put(drawn, "batch 1", multiple_of=4)
    assert len(meta) == 8
    assert [tag["response_length"] for tag in meta.tags] == [*(len(sample.response) for sample in drawn), 0, 0, 0]
    columns = plane.get(meta, ["input_ids", "token_mask", "sample_mask"])
    shortest = min(drawn, key=len)
    for row, sample in enumerate([*drawn, shortest, shortest, shortest]):
        assert columns["input_ids"][row].tolist() == [*sample.prompt, *sample.response]
        assert columns["token_mask"][row].tolist() == [False] * len(sample.prompt) + [True] * len(sample.response)
        assert meta.sequence_lengths[row] == len(sample)
        assert columns["input_ids"][row][-1] == encoder.tokenizer.eos_token_id
    assert [float(value) for value in columns["sample_mask"]] == [1.0] * 5 + [0.0] * 3


def test_the_loss_is_on_response_tokens_only(encoder: PromptEncoder) -> None:
    """Of random log-probabilities: the mean over response tokens of the real rows, whatever stands elsewhere."""
    plane = MemoryPlane()
    samples = Samples(encoder, 5, 100, "error")
    drawn = samples.next(3)
    meta = SupervisedBatches(plane, "train").put(drawn, "batch 1", multiple_of=2)
    columns = plane.get(meta, ["token_mask", "sample_mask"])
    mask = torch.nn.utils.rnn.pad_sequence(columns["token_mask"], batch_first=True)
    logprobs = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    tokens = sum(int(tag["response_length"]) for tag in meta.tags)
    wanted = -sum(
        float(logprobs[row, position]) for row, sample in enumerate(drawn) for position in range(len(sample.prompt), len(sample))
    ) / sum(len(sample.response) for sample in drawn)
    b = micro_batch(mask, torch.stack(columns["sample_mask"]), {}, tokens=tokens, sequences=len(drawn))
    loss, _ = loss_of(Sft(PolicyConfig()), b, logprobs)
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
