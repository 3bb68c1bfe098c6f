"""Data as people have them: what loads, what is refused and where, what is held out, and in which proportions sources come."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments import build
from actors.environments.base import Environment, Problem, Split
from actors.environments.dataset.environment import DatasetEnvironment
from actors.environments.dataset.mixture import Mixture, interleave
from actors.environments.dataset.problems import problem, prompt_digest
from actors.environments.export import lines
from configs.base import ConfigError
from configs.environment import EnvironmentConfig, FieldsConfig

GSM8K = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def write(path: Path, rows: list[Any], mark: bytes = b"") -> str:
    path.write_bytes(mark + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return str(path)


def numbers(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{i} + {i}", "answer": str(2 * i), "level": i % 3} for i in range(start, start + count)]


def dataset(path: Any, **changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**({"kind": "dataset", "path": str(path), "validation_size": 3} | changes))


def questions(environment: Any, split: Any) -> list[str]:
    return [environment.problem(split, index).question for index in range(environment.size(split))]


# ---- what loads ----


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "saved", "folder", "glob"])
def test_the_same_rows_in_every_form(tmp_path: Path, suffix: str) -> None:
    rows = numbers(10)
    if suffix == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        path, place = str(tmp_path / "saved"), "saved"
    elif suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        path, place = str(tmp_path / "rows.parquet"), "rows.parquet"
    elif suffix == "json":
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        path, place = str(tmp_path / "rows.json"), "rows.json"
    else:
        path, place = write(tmp_path / "rows.jsonl", rows), "rows.jsonl"
        path = {"folder": str(tmp_path), "glob": str(tmp_path / "r*.jsonl")}.get(suffix, path)
    environment = build(dataset(path), 0)
    assert (environment.size("train"), environment.size("validation")) == (7, 3)
    first = environment.problem("train", 0)
    assert (first.uid, first.question, first.answer, first.columns["level"]) == (f"{place}:1", "0 + 0", "0", 0)
    assert questions(environment, "validation") == ["7 + 7", "8 + 8", "9 + 9"]
    with pytest.raises(IndexError):
        environment.problem("train", 7)


def test_files_of_a_folder_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", numbers(3, 3))
    write(tmp_path / "a.jsonl", numbers(3))
    (tmp_path / "notes.txt").write_text("not read")
    (tmp_path / ".hidden.jsonl").write_text("not read")
    environment = build(dataset(tmp_path, validation_size=1), 0)
    assert [environment.problem("train", i).uid for i in range(5)] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b.jsonl:1", "b.jsonl:2"]


def test_uids_are_unique_where_files_have_the_same_name(tmp_path: Path) -> None:
    for start, folder in ((0, "x"), (10, "y")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "rows.jsonl", numbers(3, start))
    environment = build(dataset(tmp_path, validation_size=1), 0)
    assert [environment.problem("train", i).uid for i in range(5)] == [
        "x/rows.jsonl:1", "x/rows.jsonl:2", "x/rows.jsonl:3", "y/rows.jsonl:1", "y/rows.jsonl:2",
    ]  # fmt: skip


def test_a_url(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://data/rows.jsonl", "wb") as file:
        file.write(Path(write(tmp_path / "rows.jsonl", numbers(6))).read_bytes())
    for path in ("memory://data/rows.jsonl", "memory://data"):
        assert questions(build(dataset(path), 0), "train") == ["0 + 0", "1 + 1", "2 + 2"]


def test_a_byte_order_mark_and_line_separators_inside_text(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b\u2029c\x85d", "answer": "1"}, *numbers(4)]
    environment = build(dataset(write(tmp_path / "rows.jsonl", rows, mark=b"\xef\xbb\xbf")), 0)
    assert environment.problem("train", 0).question == "a\u2028b\u2029c\x85d"
    assert environment.problem("train", 1).uid == "rows.jsonl:2"


def test_chats_and_numbers(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "answer": 2}, {"prompt": "half?", "answer": 0.5}, *numbers(3)]
    environment = build(dataset(write(tmp_path / "rows.jsonl", rows)), 0)
    chat, half = environment.problem("train", 0), environment.problem("train", 1)
    assert (chat.question, chat.answer, chat.messages) == ("1 + 1?", "2", tuple(CHAT))
    assert (half.answer, half.messages) == ("0.5", None)


def test_a_chat_is_exported_as_it_is(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "answer": 2}, *numbers(3)]
    environment = build(dataset(write(tmp_path / "rows.jsonl", rows)), 0)
    assert [json.loads(line) for line in lines(environment, "train", 0, None)] == [{"prompt": CHAT, "answer": "2"}]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the data set is not beside this checkout")
def test_gsm8k_in_verl_s_layout_by_configuration_alone() -> None:
    fields = {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    config = dataset(GSM8K / "train.parquet", validation_path=str(GSM8K / "test.parquet"), validation_size=1319, fields=fields)
    environment = build(config, 0)
    assert environment.size("validation") == 1319
    train, test = (
        {chat[-1]["content"].strip() for chat in parquet.read_table(GSM8K / f"{name}.parquet")["prompt"].to_pylist()}
        for name in ("train", "test")
    )
    assert environment.size("train") == len(train - test)
    first = environment.problem("train", 0)
    assert first.question.startswith("Natalia sold clips")
    assert first.answer == "72"
    assert first.columns["extra_info"]["answer"].endswith("#### 72")
    assert first.messages is not None


# ---- what is refused ----


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, ["line 2", "'answer'", "environment.fields.answer", "it has prompt"]),
        ({"promt": "a", "answer": "b"}, ["line 2", "'prompt'", "did you mean 'promt'"]),
        ({"prompt": None, "answer": "b"}, ["line 2", "column 'prompt'", "null"]),
        ({"prompt": 3, "answer": "b"}, ["line 2", "column 'prompt'", "a number"]),
        ({"prompt": "", "answer": "b"}, ["line 2", "column 'prompt'", "empty"]),
        ({"prompt": " \n", "answer": "b"}, ["line 2", "column 'prompt'", "empty"]),
        ({"prompt": [], "answer": "b"}, ["line 2", "column 'prompt'", "empty chat"]),
        ({"prompt": ["hello"], "answer": "b"}, ["line 2", "message 1", "{role, content}"]),
        ({"prompt": [{"role": "human", "content": "x"}], "answer": "b"}, ["line 2", "message 1", "'human'"]),
        ({"prompt": [{"role": "user", "content": ["x"]}], "answer": "b"}, ["line 2", "message 1", "a list"]),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "answer": "b"}, ["line 2", "must end"]),
        ({"prompt": "a", "answer": None}, ["line 2", "column 'answer'", "null"]),
        ({"prompt": "a", "answer": ""}, ["line 2", "column 'answer'", "empty", "remove the row"]),
        ({"prompt": "a", "answer": True}, ["line 2", "column 'answer'", "true or false"]),
        ({"prompt": "a", "answer": ["b"]}, ["line 2", "column 'answer'", "a list"]),
        (["a", "b"], ["line 2", "list"]),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: Any, words: list[str]) -> None:
    path = write(tmp_path / "bad.jsonl", [*numbers(1), row, *numbers(5, 1)])
    with pytest.raises(ConfigError) as caught:
        build(dataset(path), 0)
    for word in ["bad.jsonl", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("line", [b"{broken", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800", "answer": "1"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 3"):
        build(dataset(path), 0)


def test_a_parquet_row_is_named(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "a", "answer": {"value": "1"}}, {"prompt": "b", "answer": {"value": None}}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet, row 2: column 'answer\.value' is null"):
        build(dataset(tmp_path / "rows.parquet", fields={"answer": "answer.value"}), 0)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match=r"environment\.path: cannot read .*torn\.parquet"):
        build(dataset(tmp_path / "torn.parquet"), 0)


def test_a_missing_number_as_pandas_writes_it_is_no_answer(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "answer": [1.0, float("nan"), 2.0]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet, row 2: column 'answer' is nan"):
        build(dataset(tmp_path / "rows.parquet", validation_size=1), 0)


def test_a_damaged_document_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"rows\.json, line 1"):
        build(dataset(tmp_path / "rows.json"), 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_several_splits_is_not_read_as_one(tmp_path: Path, streaming: bool) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(numbers(9))}).save_to_disk(str(tmp_path / "saved"))
    held_out = write(tmp_path / "held_out.jsonl", numbers(3))
    with pytest.raises(ConfigError, match=r"environment\.path: .* several splits: .*saved/train"):
        build(dataset(tmp_path / "saved", validation_path=held_out, streaming=streaming), 0)
    assert build(dataset(tmp_path / "saved" / "train"), 0).size("train") == 6


@pytest.mark.parametrize(("content", "message"), [("", "empty"), ("\n \n", "empty"), ("[]", "list")])
def test_nothing_to_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "none.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(dataset(tmp_path / "none.jsonl"), 0)


def test_no_file_and_no_suffix_and_too_few(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path / "no*.jsonl", "nosuch://x/rows.jsonl"):
        with pytest.raises(ConfigError, match=r"^environment\.path: "):
            build(dataset(path), 0)
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"\.jsonl, \.json, \.parquet"):
        build(dataset(tmp_path / "rows.csv"), 0)
    with pytest.raises(ConfigError, match=r"3 different prompts, not more than validation_size = 3"):
        build(dataset(write(tmp_path / "few.jsonl", numbers(3) * 2)), 0)


# ---- what is held out ----


def test_repeated_prompts_do_not_leak_into_training(tmp_path: Path) -> None:
    environment = build(dataset(write(tmp_path / "rows.jsonl", numbers(50) * 2), validation_size=20), 0)
    train, validation = questions(environment, "train"), questions(environment, "validation")
    assert not set(train) & set(validation)
    assert (len(train), len(set(train)), len(set(validation))) == (30, 30, 20)


PROMPTS = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30)


@given(train=PROMPTS, validation=st.one_of(st.none(), PROMPTS), size=st.integers(1, 5))
def test_no_prompt_is_trained_on_twice_or_held_out_as_well(
    tmp_path_factory: pytest.TempPathFactory, train: list[str], validation: list[str] | None, size: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    path = write(folder / "train.jsonl", [{"prompt": f"{name}{' ' * (i % 2)}", "answer": str(i)} for i, name in enumerate(train)])
    held_out = None if validation is None else write(folder / "v.jsonl", [{"prompt": name, "answer": "1"} for name in validation])
    kept = set(train) - set((validation or [])[:size])
    try:
        environment = build(dataset(path, validation_path=held_out, validation_size=size), 0)
    except ConfigError:
        assert not kept if validation else len(set(train)) <= size
        return
    trained = [question.strip() for question in questions(environment, "train")]
    asked = [question.strip() for question in questions(environment, "validation")]
    assert len(trained) == len(set(trained))
    assert not set(trained) & set(asked)
    assert set(trained) | set(asked) >= set(train)
    if validation is not None:
        assert (set(trained), asked) == (kept, validation[:size])


def test_a_prompt_is_the_same_as_text_and_as_a_chat() -> None:
    def digest(prompt: Any, answer: str) -> bytes:
        return prompt_digest(problem({"p": prompt, "a": answer}, FieldsConfig(prompt="p", answer="a"), uid="1", place="here"))

    assert digest("hi", "1") == digest([{"role": "user", "content": " hi\n"}], "2") != digest("ho", "1")


# ---- mixtures ----


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    weights=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
)
def test_every_beginning_of_a_mixture_is_within_one_prompt_of_its_weights(sizes: list[int], weights: list[float]) -> None:
    named = {f"s{i}": size for i, size in enumerate(sizes)}
    weights = weights[: len(sizes)]
    order = interleave(named, weights)
    bound = 1 - 1 / (2 * len(sizes) - 2) if len(sizes) > 1 else 0  # Tijdeman 1980
    drawn: Counter[str] = Counter()
    for place in range(len(order)):
        source, number = order[place]
        name = f"s{source}"
        assert number == drawn[name] % named[name]  # each of its prompts once before any again
        drawn[name] += 1
        for other, weight in zip(named, weights, strict=True):
            assert abs(drawn[other] - (place + 1) * weight / sum(weights)) < bound + 1e-6
    assert all(drawn[name] >= size for name, size in named.items())
    assert drawn[name] == named[name]  # the last one: and no longer than that takes


def test_an_epoch_that_would_not_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sources\.b: with its weight an epoch would have 100,000,100,000 prompts"):
        interleave({"a": 10, "b": 100_000}, [1e6, 1])


@given(
    first=st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=12),
    second=st.lists(st.sampled_from("defghijkl"), min_size=4, max_size=12),
)
def test_what_one_source_holds_out_is_trained_on_in_none(
    tmp_path_factory: pytest.TempPathFactory, first: list[str], second: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    sources = [
        {"name": name, "path": write(folder / f"{name}.jsonl", [{"prompt": one, "answer": "1"} for one in prompts]), "validation_size": 1}
        for name, prompts in (("first", first), ("second", second))
    ]
    held_out = {list(dict.fromkeys(prompts))[-1] for prompts in (first, second)}
    kept = set(first) - held_out, set(second) - held_out - set(first)
    if not all(kept):
        with pytest.raises(ConfigError):
            build(EnvironmentConfig(sources=sources), 0)
        return
    environment = build(EnvironmentConfig(sources=sources), 0)
    assert set(questions(environment, "validation")) == held_out
    drawn = {"first": set(), "second": set()}
    for index in range(environment.size("train")):
        one = environment.problem("train", index)
        drawn[one.source].add(one.question)
    assert (drawn["first"], drawn["second"]) == kept


class Sums(Environment):
    """Generated: 0 + 0, 1 + 1 ..."""

    def size(self, split: Split) -> int:
        return 8 if split == "train" else 1

    def problem(self, split: Split, index: int) -> Problem:
        number = index if split == "train" else 100
        return Problem(uid=f"{split}:{index}", question=f"{number} + {number}", answer=str(2 * number))


def test_a_generated_prompt_that_a_file_holds_out_is_passed_over(tmp_path: Path) -> None:
    file = DatasetEnvironment(dataset(write(tmp_path / "rows.jsonl", [*numbers(2, 50), *numbers(3)])))
    environment = Mixture({"sums": Sums(), "file": file}, [1, 1])
    trained = [environment.problem("train", index) for index in range(environment.size("train"))]
    assert {one.question for one in trained} == {f"{i} + {i}" for i in (3, 4, 5, 6, 7, 50, 51)}
    assert [one.source for one in trained[:4]] == ["sums", "file", "sums", "file"]


def test_a_mixture_of_a_file_and_a_task(tmp_path: Path) -> None:
    sources = [
        {"name": "sums", "path": write(tmp_path / "rows.jsonl", numbers(20)), "validation_size": 4, "weight": 3},
        {"name": "gym", "task": "chain_sum", "validation_size": 2, "train_size": 10},
    ]
    config = EnvironmentConfig(sources=sources)
    assert config.kinds == ("dataset", "reasoning_gym")
    environment, again = build(config, 5), build(config, 5)
    problems = [environment.problem("train", i) for i in range(36)]
    assert Counter(one.source for one in problems) == {"sums": 27, "gym": 9}
    assert problems == [again.problem("train", i) for i in range(36)]
    assert [one.uid for one in problems if one.source == "sums"][:17] == [f"sums:rows.jsonl:{i}" for i in [*range(1, 17), 1]]
    assert Counter(environment.problem("validation", i).source for i in range(6)) == {"sums": 4, "gym": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sources": [{"name": "a"}]}, "one of `path`"),
        ({"sources": [{"name": "a", "path": "x", "task": "chain_sum"}]}, "one of `path`"),
        ({"sources": [{"name": "low", "path": "x"}]}, "no name for a source"),
        ({"sources": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]}, "two are called 'a'"),
        ({"sources": [{"name": "a", "path": "x"}], "path": "y"}, "leave out path"),
        ({"sources": [{"name": "a", "path": "x"}], "task": "leg_counting"}, "leave out task"),
        ({"sources": [{"name": "a", "path": "x", "task_options": {"b": 1}}]}, "task_options are of a `task`"),
        ({"sources": [{"name": "a", "task": "chain_sum", "validation_path": "x"}]}, "validation_path and fields are of a data set"),
        ({"sources": [{"name": "a", "path": "s3://key:secret@bucket/x"}]}, "password"),
        ({"kind": "dataset"}, "needs `path`"),
        ({"path": "x.jsonl"}, "kind 'dataset'"),
        ({"validation_path": "x.jsonl"}, "kind 'dataset'"),
        ({"kind": "dataset", "path": "x", "streaming": True}, "give `validation_path`"),
        ({"kind": "dataset", "path": "s3://key:secret@bucket/x"}, "password"),
        ({"kind": "dataset", "path": "x", "curriculum": {}}, "no levels of difficulty"),
        ({"kind": "python", "import_path": "os.system"}, "package.module:Class"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        EnvironmentConfig(**changes)
    assert "secret" not in str(caught.value)
