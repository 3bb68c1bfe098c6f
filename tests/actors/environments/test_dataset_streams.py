"""Data sets read as they are drawn from: each row once an epoch, always under one uid; a resumed stream draws what the first would have."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environments import build
from actors.rollout.prompts import PromptStream
from configs.base import ConfigError
from configs.environment import EnvironmentConfig
from tests.actors.environments.test_dataset import dataset, numbers, questions, write


def streamed(tmp_path: Path, count: int = 40, **changes: Any) -> EnvironmentConfig:
    rows = write(tmp_path / "rows.jsonl", numbers(count))
    held_out = write(tmp_path / "held_out.jsonl", numbers(3))
    return dataset(**({"path": rows, "validation_path": held_out, "streaming": True, "shuffle_buffer": 4} | changes))


def several_files(tmp_path: Path) -> str:
    """Rows 0 to 49 in every form that a stream reads."""
    folder = tmp_path / "several"
    folder.mkdir()
    write(folder / "a.jsonl", numbers(11), mark=b"\xef\xbb\xbf")
    parquet.write_table(pyarrow.Table.from_pylist(numbers(20, 11)), folder / "b.parquet", row_group_size=7)
    (folder / "c.json").write_text(json.dumps(numbers(9, 31)))
    (folder / "d.jsonl").write_text("\n\n" + "\n\n".join(json.dumps(row) for row in numbers(10, 40)))
    return str(folder)


def test_a_stream_draws_every_row_that_is_not_held_out_once_an_epoch(tmp_path: Path) -> None:
    environment = build(streamed(tmp_path), 0)
    drawn = [environment.next_train() for _ in range(74)]
    wanted = {f"{i} + {i}" for i in range(3, 40)}
    assert {one.question for one in drawn[:37]} == {one.question for one in drawn[37:]} == wanted
    assert [one.question for one in drawn[:37]] != [one.question for one in drawn[37:]]
    assert all(one.uid == f"rows.jsonl:{int(one.question.split()[0]) + 1}" for one in drawn)
    assert questions(environment, "validation") == ["0 + 0", "1 + 1", "2 + 2"]
    assert environment.stream_state()["passed"] == 6


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_a_stream_of_several_files_keeps_the_uid_of_every_row(tmp_path: Path, block: int) -> None:
    environment = build(streamed(tmp_path, path=several_files(tmp_path), shuffle_buffer=block), 0)
    epochs = [[environment.next_train() for _ in range(47)] for _ in range(3)]
    uids = [{one.uid: one.question for one in epoch} for epoch in epochs]
    assert uids[0] == uids[1] == uids[2]
    assert set(uids[0].values()) == {f"{i} + {i}" for i in range(3, 50)}
    assert {uid: uids[0][uid] for uid in ("a.jsonl:11", "b.parquet:1", "b.parquet:20", "c.json:9", "d.jsonl:3", "d.jsonl:21")} == {
        "a.jsonl:11": "10 + 10", "b.parquet:1": "11 + 11", "b.parquet:20": "30 + 30", "c.json:9": "39 + 39", "d.jsonl:3": "40 + 40",
        "d.jsonl:21": "49 + 49",
    }  # fmt: skip
    assert [one.uid for one in epochs[0]] != [one.uid for one in epochs[1]]


def test_a_stream_of_a_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(numbers(10)).save_to_disk(str(tmp_path / "saved"))
    environment = build(streamed(tmp_path, path=str(tmp_path / "saved")), 0)
    assert {environment.next_train().uid for _ in range(7)} == {f"saved:{i}" for i in range(4, 11)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("stream")
    return folder, several_files(folder)


@settings(max_examples=40)
@given(before=st.integers(0, 110), block=st.integers(1, 60), seed=st.integers(0, 3))
def test_a_stream_goes_on_where_its_state_was_taken(files: tuple[Path, str], before: int, block: int, seed: int) -> None:
    config = streamed(files[0], path=files[1], shuffle_buffer=block)
    first, second = PromptStream(build(config, seed), seed), PromptStream(build(config, seed), seed)
    first.draw(before)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.draw(60) == first.draw(60)
    assert second.state() == first.state()


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = build(streamed(tmp_path), 0).stream_state()
    for changes in ({"shuffle_buffer": 5}, {"path": several_files(tmp_path)}):
        with pytest.raises(ConfigError, match=r"environment\.path: the run to resume"):
            build(streamed(tmp_path, **changes), 0).restore_stream(state)


def test_a_damaged_row_of_a_stream_is_named_when_it_is_drawn(tmp_path: Path) -> None:
    config = streamed(tmp_path)
    for line, message in [('{"prompt": "x", "answer": null}', "column 'answer' is null"), ("{broken", "not a JSON object")]:
        write(tmp_path / "rows.jsonl", numbers(5))
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write(f"{line}\n")
        environment = build(config, 0)
        with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 6: {message}"):
            [environment.next_train() for _ in range(10)]


def test_a_stream_keeps_text_that_looks_like_a_date(tmp_path: Path) -> None:
    config = streamed(tmp_path)
    write(tmp_path / "rows.jsonl", [{"prompt": "when?", "answer": "2020-01-03"}, {"prompt": "how many?", "answer": 3}])
    environment = build(config, 0)
    assert {environment.next_train().answer for _ in range(2)} == {"2020-01-03", "3"}


def test_a_stream_of_which_all_is_held_out_or_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no row that is not held out"):
        build(streamed(tmp_path, count=3), 0).next_train()
    with pytest.raises(ConfigError, match=r"^environment\.path: cannot read nosuch://"):
        build(streamed(tmp_path, path="nosuch://x/rows.jsonl"), 0)
