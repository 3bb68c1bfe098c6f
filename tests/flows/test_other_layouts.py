"""Data and reward functions of TRL and verl, as docs/coming-from.md says: by recipe alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from actors.environments import build
from actors.environments.rewards.base import Response
from actors.environments.rewards.python import PythonReward
from configs import rewards as configured
from configs.loader import load
from flows.grpo_session import GrpoSession
from tests.configs.names_page import FIRST, PAGE, tables

ASKED = 'Let\'s think step by step and output the final answer after "####".'


def verl_rows(split: str, first: int, count: int) -> list[dict[str, Any]]:
    """As examples/data_preprocess/gsm8k.py of verl writes them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + 1? {ASKED}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": split, "index": i, "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}", "question": f"What is {i} + 1?"},
        }
        for i in range(first, first + count)
    ]


def test_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, first, count in (("train", 0, 100), ("test", 100, 20)):
        parquet.write_table(pyarrow.Table.from_pylist(verl_rows(split, first, count)), tmp_path / f"{split}.parquet")
    files = [f"environment.path={tmp_path}/train.parquet", f"environment.validation_path={tmp_path}/test.parquet"]
    config = load("gsm8k-cpu", [*files, "model.max_position_embeddings=256"])
    GrpoSession.prepare(config, tmp_path / "model")
    environment = build(config.environment, config.seed)
    assert (environment.size("train"), environment.size("validation")) == (100, 20)
    problem = environment.problem("train", 41)
    assert (problem.question, problem.answer) == (f"What is 41 + 1? {ASKED}", "42")

    block = re.search(r"```python\n# from_verl\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "from_verl.py").write_text(block[1])
    monkeypatch.syspath_prepend(tmp_path)
    reward = PythonReward(configured.PythonReward(import_path="from_verl:reward"))
    assert [reward.score(problem, Response(text, 3, False)) for text in ("41 + 1 is #### 42", "#### 43")] == [1.0, 0.0]


@pytest.mark.parametrize("chat", [False, True])
def test_trl(tmp_path: Path, chat: bool) -> None:
    rows = []
    for i in range(200):
        question = f"What is {i} + 1?"
        rows.append({"prompt": [{"role": "user", "content": question}] if chat else question, "solution": f"${i + 1}$"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load("trl-layout-cpu", [f"environment.path={tmp_path}/train.jsonl", "model.max_position_embeddings=256"])
    GrpoSession.prepare(config, tmp_path / "model")
    environment = build(config.environment, config.seed)
    assert (environment.size("train"), environment.size("validation")) == (136, 64)
    problem = environment.problem("train", 0)
    assert (problem.question, problem.answer, problem.messages is not None) == ("What is 0 + 1?", "$1$", chat)


def test_the_page_has_the_names() -> None:
    assert PAGE.read_text().partition(FIRST)[1:] == (FIRST, tables().removeprefix(FIRST)), "python -m tests.configs.names_page"
