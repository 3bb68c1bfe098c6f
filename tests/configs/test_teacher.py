"""policy.teacher: one teacher, one for each source of a mixture, and what is wrong with others."""

from __future__ import annotations

import pytest

from configs.base import ConfigError
from configs.loader import load
from configs.model import TeacherConfig
from configs.sft import SftConfig

MIXTURE = "environment={sources: [{name: sums, task: chain_sum}, {name: words, task: spell_backward}]}"
DISTILLED = ["preset=on-policy-distillation", MIXTURE]


def test_one_teacher_is_that_of_every_source() -> None:
    teacher = load("arithmetic-cpu", [*DISTILLED, "policy.teacher.path=one", "policy.teacher.top_k=64"]).policy.teacher
    assert teacher is not None
    assert teacher.models == {"": "one"}
    assert (teacher.candidates(1000), teacher.candidates(50)) == (64, 50)


def test_each_source_may_have_its_own() -> None:
    config = load("arithmetic-cpu", [*DISTILLED, "policy.teacher={path: one, top_k: full, sources: {words: two}}"])
    teacher = config.policy.teacher
    assert teacher is not None
    assert teacher.models == {"": "one", "words": "two"}
    assert teacher.candidates(1000) == 1000
    load("arithmetic-cpu", [*DISTILLED, "policy.teacher.sources={words: two, sums: one}"])
    load("arithmetic-cpu", [*DISTILLED, "policy.teacher.sources={words: two}", "policy.loss.sources={sums: {kl_coef: 0}}"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "policy.teacher={sources: {wrds: two}}",
            r"policy.teacher.sources: 'wrds' is no name in environment.sources; did you mean 'words'",
        ),
        ("policy.teacher={sources: {words: two}}", r"policy.teacher.sources has no teacher for 'sums', whose KL term wants one"),
        (
            "policy.teacher={path: one, sources: {words: two}} policy.loss.sources={words: {kl_coef: 0}}",
            r"policy.teacher.sources.words would never be asked: policy.loss.sources.words.kl_coef is 0",
        ),
        ("policy.teacher={path: one, sources: {words: two, sums: two}}", "policy.teacher.path would never be asked"),
        ("policy.teacher={top_k: 3}", "set path, or sources"),
    ],
)
def test_a_teacher_that_nobody_asks_and_a_source_without_one(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("arithmetic-cpu", [*DISTILLED, *overrides.replace(" policy.loss", "\npolicy.loss").split("\n")])


def test_supervised_runs_have_no_sources() -> None:
    with pytest.raises(ConfigError, match=r"policy\.teacher\.sources is of grpo"):
        load("sft-cpu", ["policy.teacher.sources={words: two}", "policy.loss={objective: dpo}"], SftConfig)


def test_nobody_is_no_teacher() -> None:
    with pytest.raises(ValueError, match="a teacher is a model"):
        TeacherConfig()
