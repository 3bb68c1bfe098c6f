"""python -m flows.audit: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.rollout.audit import audit
from actors.rollout.journal import Cut, Finished, Resumed, Stored, parse
from actors.rollout.transitions import Admitted, Announced, Claimed, Ended
from flows.audit import main
from tasks.audit import as_markdown
from tests.actors.rollout.journals import began, written

RUN = [
    began(), Admitted("a", ("a0",), 0, None), Stored("a", ("a0",), 0, 0), Cut(1, "step-000001.json", 0), Announced(1), Claimed("a", 1),
    Ended("a", "trained"), Resumed(3, "step-000001.json", "the collector\ndied | twice"), Announced(1), Claimed("a", 1),
    Ended("a", "trained"), Finished(),
]  # fmt: skip


def test_a_clean_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal.jsonl").write_bytes(written(RUN) + b'{"n":')
    assert main([str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out
        == f"""{tmp_path}/journal.jsonl
run 'run-1': sampler 'windowed', max_trajectory_age_steps 1, 2 groups per step; weight version 1
12 lines, 9 of them count; 1 checkpoints; finished
an unfinished last line of 5 bytes is left out

         1  admitted
         1  trained
         1  trained at age 1

line 7 went back to checkpoint 'step-000001.json' (the collector\\ndied | twice):
  3 lines became void: of 1 groups, 1 of them trained, of weight versions 1

clean: of 1 groups, 1 trained once, 0 ended with a reason
"""
    )
    assert main([str(tmp_path / "journal.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["clean"], found["admitted"], found["ends"], found["voided"][0]["groups"]) == (True, 1, {"trained": 1}, 1)


def test_a_run_that_fails_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "j"
    path.write_bytes(written([*RUN[:-1], Ended("a", "trained")]))
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.endswith("\nFAILED at line 11: ended: group 'a' has ended before\n")
    assert main([str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problem"] == {"line": 11, "why": "ended: group 'a' has ended before"}
    path.write_bytes(written(RUN).replace(b'"a0"', b'"b0"'))
    assert main([str(path)]) == 1
    assert "FAILED at line 1: its hash is not that of its text" in capsys.readouterr().out


def test_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"error: {tmp_path}/journal.jsonl: " in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
    assert main(["a\0b"]) == 2


def test_the_page() -> None:
    page = as_markdown(audit(parse(written(RUN))))
    assert page.startswith("# Audit: clean\n\nclean: of 1 groups, 1 trained once")
    assert "| 7 | step-000001.json | the collector died \\| twice | 3 | 1 | 1 | 1 |" in page
    assert as_markdown(audit(parse(written(RUN[1:])))).startswith("# Audit: failed\n\nFAILED at line 0: ")
