import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tasks.reporting.html import write_report
from tasks.reporting.run_dir import RunDirectory
from tasks.reporting.trackers.run_trackers import RunTrackers
from tests.tasks.reporting.runs import Said, summary, write_run, write_sft_run

VOID = {"meta", "col", "br", "input"}


class Page(HTMLParser):
    """Checks that tags close in order; gathers text and attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def page(directory: RunDirectory) -> Page:
    assert write_report(directory) == directory.report
    return Page(directory.report.read_text(encoding="utf-8"))


def test_a_whole_run(tmp_path: Path) -> None:
    report = page(write_run(tmp_path))
    words = " ".join(report.text.split())
    for expected in ("tiny completed", "arithmetic-cpu · seed 7", "0.125 → 0.875", "0.250 → 0.750", "1 min 16 s", "8,000"):
        assert expected in words
    assert "prompt expected answer before (step 0) after (step 4) 1 + 2 = ? 3 4 0.000 3 1.000" in words
    assert "sampled at 1" in words
    assert "name: tiny" in report.text
    assert "No values were recorded" not in words
    assert sum(tag == "svg" for tag, _ in report.tags) == 6
    assert "rollout logprob ref_logprob advantage train refit validate" in words  # the legend


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    report = page(directory)
    assert not {tag for tag, _ in report.tags} & {"link", "iframe", "img", "object", "embed", "base"}
    assert [attributes for tag, attributes in report.tags if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert not [attributes for _, attributes in report.tags if {"src", "href", "onclick", "onload"} & set(attributes)]
    assert not re.search(r"https?:|url\(|@import", directory.report.read_text())


def test_what_the_model_says_is_text_and_never_markup(tmp_path: Path) -> None:
    attack = '</td><script>alert("1")</script><img src=x onerror=alert(1)>{{ 7 * 7 }}&amp;'
    directory = write_run(tmp_path, question=attack, said=attack)
    directory.config.write_text(f"name: {attack}\n")
    with RunTrackers(directory) as run:
        run.metrics(4, {f"time/{attack}": 1.0, attack: float("nan")})
    summary(name=attack, recipe=attack, error=attack, seconds_per_stage={attack: 1.0}).write(directory)
    report = page(directory)
    assert not {tag for tag, _ in report.tags} & {"img"}
    assert sum(tag == "script" for tag, _ in report.tags) == 2
    assert report.text.count(attack) >= 8  # as it was said, wherever it is shown


def test_a_run_that_failed_before_anything(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    nothing = dict.fromkeys(["reward_before", "reward_after", "accuracy_before", "accuracy_after", "mean_logprob_error"])
    summary(**nothing, status="failed", steps=0, seconds=0.0, tokens=0, seconds_per_stage={}, error="EngineDiedError: vllm-0").write(
        directory
    )
    text = " ".join(page(directory).text.split())
    assert "Failed: EngineDiedError: vllm-0" in text
    assert text.count("No values were recorded.") == 6
    assert "The run ended before its first validation." in text
    with RunTrackers(directory):
        pass  # the files exist, empty: how a run that failed in its first step leaves them
    assert " ".join(page(directory).text.split()) == text


def test_a_run_that_failed_after_its_first_validation(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    with RunTrackers(directory) as run:
        run.metrics(0, {"accuracy/validation": 0.0, "reward/validation": 0.0})
        run.samples(0, "before", [Said("p", "r", "a", 0.0)])
    summary(status="cancelled", steps=0).write(directory)
    assert "before (step 0) after p a r 0.000 –" in " ".join(page(directory).text.split())


def test_one_step(tmp_path: Path) -> None:
    assert "after (step 1)" in page(write_run(tmp_path, steps=1)).text


def test_many_steps_stay_small(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=1500)
    page(directory)
    assert directory.report.stat().st_size < 400_000


def test_the_latest_validation_stands_for_after(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny")
    with RunTrackers(directory) as run:
        run.samples(0, "before", [Said("same", "r1", "a", 0.0), Said("same", "r2", "a", 0.0), Said("gone", "r3", "a", 0.0)])
        run.samples(10, "validation", [Said("same", "old", "a", 0.0)])
        run.samples(20, "validation", [Said("new", "r4", "a", 0.0), Said("same", "r5", "a", 1.0), Said("same", "r6", "a", 1.0)])
    summary(status="failed").write(directory)
    text = " ".join(page(directory).text.split())
    assert "after (step 20) same a r1 0.000 r5 1.000 same a r2 0.000 r6 1.000 gone a r3 0.000 –" in text
    assert "old" not in text


def test_values_that_were_not_finite_are_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path)
    with RunTrackers(directory) as run:
        for step in range(5, 20):
            run.metrics(step, {"loss": float("nan"), "time/step": float("nan"), "kl": float("inf")})
    text = page(directory).text
    assert "step 5: kl was not finite; step 5: loss was not finite" in text
    assert "and 35 more" in text


def test_broken_tokens_do_not_break_the_page(tmp_path: Path) -> None:
    assert "a?b" in page(write_run(tmp_path, said="a\udc80b")).text


def test_no_summary_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        write_report(RunDirectory.create(tmp_path, "tiny"))


def test_an_sft_run_shows_losses_and_no_rewards(tmp_path: Path) -> None:
    report = page(write_sft_run(tmp_path))
    words = " ".join(report.text.split())
    for expected in (
        "taught completed",
        "5.250 → 1.500",
        "1.250",
        "best checkpoint (step 2)",
        "early stop",
        "SFT steps",
        "TFLOP/s per worker",
    ):
        assert expected in words
    for absent in ("reward", "Reward", "accuracy", "KL", "GRPO", "weight version", "before and after", "No values were recorded"):
        assert absent not in words
    assert sum(tag == "svg" for tag, _ in report.tags) == 5


@pytest.mark.parametrize("write", [write_run, write_sft_run])
def test_a_float16_run_shows_its_loss_scale_and_skipped_updates(tmp_path: Path, write: Callable[[Path], RunDirectory]) -> None:
    directory = write(tmp_path)
    before = page(directory)
    assert not any(title in before.text for title in ("Loss scale", "Skipped updates"))
    with RunTrackers(directory) as run:
        for step, scale in enumerate((65536.0, 32768.0, 16384.0, 16384.0), start=1):
            run.metrics(step, {"loss_scale": scale, "skipped_steps": float(step < 3)})
    after = page(directory)
    assert "Loss scale" in after.text
    assert "Skipped updates" in after.text
    assert sum(tag == "svg" for tag, _ in after.tags) == sum(tag == "svg" for tag, _ in before.tags) + 2
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', directory.report.read_text())
    assert found is not None
    lines = {line["label"]: line["values"] for chart in json.loads(found[1])["charts"] for line in chart["lines"]}
    assert lines["scale"][-4:] == [65536, 32768, 16384, 16384]
    assert lines["updates"][-4:] == [1, 1, 0, 0]
