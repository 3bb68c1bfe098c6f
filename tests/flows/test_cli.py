"""The command line: what it prints, and that wrong input ends before anything starts."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
import yaml

from configs.loader import load
from configs.run import RunConfig
from flows.cli import main, plan
from flows.grpo import grpo
from flows.grpo_session import GrpoSession
from tests.conftest import ROOT
from tests.patience import WAIT_S


def test_dry_run_prints_configuration_and_actors_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    already = ray.is_initialized()
    assert (
        main(grpo, GrpoSession, ["--dry-run", "steps=7", f"output_dir={tmp_path}", "generation.num_engines=2", "policy.parallel.data=2"])
        == 0
    )
    out = capsys.readouterr().out
    assert yaml.safe_load(out.split("\nActors")[0])["steps"] == 7
    for name in ("data plane", "engine-0", "engine-1", "collector", "environment", "policy-worker-0", "policy-worker-1", "DP2"):
        assert name in out
    holds, *phases = out.split("Memory of a GPU")[1].splitlines()[1:]
    assert holds.startswith("  engine and policy worker: at most ")
    assert "worker's context" in next(line for line in phases if "train" in line)
    assert "engine's KV cache 1.00" in next(line for line in phases if "rollout" in line)
    assert ray.is_initialized() == already
    assert not list(tmp_path.iterdir())


def test_dry_run_says_what_would_be_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.models import memory_plan

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory_plan, "gpu_capacity", lambda: 8.0 * 2**30)
    for gib, said in (("8", "would be refused: a GPU with engine and policy worker"), ("4", "warning: a GPU with engine and policy")):
        assert main(grpo, GrpoSession, ["--dry-run", f"generation.kv_cache_gib={gib}"]) == 0
        assert f"  {said}" in capsys.readouterr().out


def test_options_may_stand_between_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(grpo, GrpoSession, ["steps=7", "--recipe", "arithmetic-cpu-async", "--dry-run", "seed=3"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out.split("\nActors")[0])
    assert (resolved["name"], resolved["steps"], resolved["seed"]) == ("arithmetic-cpu-async", 7, 3)


def test_flows_and_data_plane_come_without_torchs_compiler() -> None:
    """It would cost every command, deployment, scheduled run and storage actor some seconds."""
    modules = "flows.grpo, flows.sft, flows.retrain, actors.data_plane.transfer_queue.processes"
    code = f"import sys, {modules}; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)


def test_a_dry_run_needs_no_model() -> None:
    config = load("arithmetic-cpu").model_dump(exclude={"model"}) | {"model": {"path": "/nowhere"}}
    assert "unknown: model.path: there is no directory /nowhere" in plan(RunConfig.model_validate(config), GrpoSession)


def test_plan_is_a_recipe_again(tmp_path: Path) -> None:
    config = load("arithmetic-cpu", ["seed=5"])
    path = tmp_path / "again.yaml"
    path.write_text(plan(config, GrpoSession).split("\nActors")[0])
    assert load(str(path)) == config


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A small model as the recipe writes it."""
    from actors.preflight import prepare_model

    return Path(prepare_model(load("arithmetic-cpu"), tmp_path / "model"))


def with_model(tmp_path: Path, path: Path, **changes: object) -> str:
    recipe = yaml.safe_load(Path("configs/recipes/arithmetic-cpu.yaml").read_text())
    recipe["model"] = {"path": str(path)}
    for name, value in changes.items():
        recipe[name] = recipe.get(name, {}) | value if isinstance(value, dict) else value
    target = tmp_path / "recipe.yaml"
    target.write_text(yaml.safe_dump(recipe))
    return str(target)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a run that was refused."""
    already = ray.is_initialized()
    assert main(grpo, GrpoSession, list(arguments)) == 2
    assert ray.is_initialized() == already
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


def test_a_misspelt_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'clip_grad'" in refused(capsys, "policy.optimizer.clip_grd=3")


def test_a_model_directory_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    message = refused(capsys, "--recipe", with_model(tmp_path, model_dir))
    assert "model.path" in message
    assert "no weights" in message
    assert "model.safetensors" in message


def test_weights_that_vllm_would_load_besides(capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: Path) -> None:
    (model_dir / "adapter.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    message = refused(capsys, "--recipe", with_model(tmp_path, model_dir))
    assert "adapter.safetensors beside model.safetensors" in message
    assert "move it out" in message


def test_no_model_directory_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "model.path" in refused(capsys, "--recipe", with_model(tmp_path, tmp_path / "nowhere"))


def test_a_teacher_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe, teacher = with_model(tmp_path, model_dir), tmp_path / "teacher"
    assert f"policy.teacher.path: there is no directory {teacher}" in refused(capsys, "--recipe", recipe, f"policy.teacher.path={teacher}")
    never = refused(capsys, "--recipe", recipe, f"policy.teacher.path={teacher}", "policy.loss={kl_coef: 0}")
    assert "policy: teacher would never be asked (policy.loss.kl_coef is 0" in never
    shutil.copytree(model_dir, teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    assert "samples may have 64 tokens, the context of" in refused(capsys, "--recipe", recipe, f"policy.teacher.path={teacher}")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in sorted(vocabulary) if token.isalnum()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused(capsys, "--recipe", recipe, f"policy.teacher.path=file://{teacher}")
    assert list((tmp_path / "cache").rglob("tokenizer.json"))  # by a name that is no directory
    assert f"token {first!r} is number" in message
    assert "a teacher must have the tokenizer of the model that it teaches" in message


def test_a_tokenizer_larger_than_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    message = refused(capsys, "--recipe", with_model(tmp_path, model_dir))
    assert "vocab_size is 100" in message
    assert "tokenizer" in message


def test_a_batch_that_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "policy.parallel.data=3")
    assert "512" in message
    assert "policy.parallel.data" in message


def test_a_group_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "group of 1" in refused(capsys, "rollout.responses_per_prompt=1")


def test_a_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "model.max_position_embeddings=16")
    assert "rollout.max_new_tokens" in message
    assert "tokens" in message


def test_an_empty_data_set(capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.touch()
    recipe = with_model(tmp_path, model_dir, environment={"kind": "dataset", "path": str(data)})
    message = refused(capsys, "--recipe", recipe)
    assert str(data) in message
    assert "empty" in message


def test_a_head_size_that_the_engine_has_no_kernel_for(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "model.hidden_size=64")
    assert "16 dimensions" in message
    assert "model.hidden_size" in message


def test_a_layout_that_does_not_divide_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "policy.parallel.tensor: 4 does not divide the model's num_key_value_heads (2)" in refused(capsys, "policy.parallel.tensor=4")


def test_a_ray_address_where_nothing_listens() -> None:
    from configs.base import ConfigError
    from tasks.cluster import probe

    with pytest.raises(ConfigError, match=r"ray\.address: no Ray cluster answers at '127\.0\.0\.1:1'"):
        probe("127.0.0.1:1")


def test_sigterm_clears_what_is_temporary(tmp_path: Path) -> None:
    """As Prefect sends it on, when it has cancelled the flow's run."""
    script = """
import signal, time
from flows.stopping import terminated
from tasks.scratch import scratch
with terminated(), scratch() as place:
    (place / "file").write_text("x")
    print(place, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        place = Path(process.stdout.readline().strip())
        assert (place / "file").exists()
        process.terminate()
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert not place.exists()


@pytest.mark.parametrize("hook", ["before", "after_in_parent"])
def test_sigterm_in_a_hook_of_a_fork_is_heard(hook: str) -> None:
    """Python ignores exceptions there, and logging's hooks hold its lock. Ray and we fork with hooks while a run begins."""
    script = f"""
import os, signal, subprocess, time
os.register_at_fork({hook}=lambda: os.kill(os.getpid(), signal.SIGTERM))
from flows.stopping import terminated
with terminated():
    subprocess.run(["true"], preexec_fn=int, check=True)
    time.sleep({WAIT_S})
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=2 * WAIT_S).returncode == 128 + signal.SIGTERM
