"""A policy that was saved goes on as if it had never stopped: to the bit in its own layout, within rounding in another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.policy import tiny
from tests.actors.policy.conftest import LAYOUTS, OPTIMIZER
from tests.actors.policy.program import Job, run_layout

pytestmark = pytest.mark.slow
SCHEDULE = {"optimizer": OPTIMIZER | {"warmup_steps": 3, "decay_style": "linear", "decay_steps": 8}}
BFLOAT16 = SCHEDULE | {"dtype": "bfloat16"}
BONUS = {"optimizer": OPTIMIZER, "loss": {"target_entropy": 5.0, "entropy_coef_step": 0.1}}  # above log(97): it rises at every update
VOCAB = 97  # padded for TP2
WHOLE = ("sft", "sft", "sft", "sft", "export")
REST = ("sft", "sft", "export", "state")
SAVED = ("sft", "snapshot", "sft", "save_reference", "begin_save", "draw", "sft", "finish_save", "sft", "export", "reference")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return tiny.write_model(root / "model", "qwen3", tied=True, vocab=VOCAB)


@pytest.fixture(scope="module")
def job(model: Path, root: Path) -> Any:
    """`job(name, actions, state)`: on the model, about a directory of that name."""

    def make(
        name: str, actions: tuple[str, ...], state: str, policy: dict[str, Any] = SCHEDULE, model: Path = model, **options: Any
    ) -> Job:
        return Job(name, str(model), actions, vocab=VOCAB, policy=policy, directory=str(root / state), **options)

    return make


@pytest.fixture(scope="module")
def one(job: Any) -> Any:
    """What one process did: trained without a stop, and with saves."""
    again = ("sft", "begin_save", "finish_save", "sft", "begin_save", "finish_save", "sft", "sft", "load", *REST)
    return run_layout(
        LAYOUTS["TP1"],
        [
            job("whole", WHOLE, ""),
            job("saved", SAVED, "one"),
            job("bonus", ("grpo", "grpo", "begin_save", "finish_save", "grpo", "grpo", "export"), "bonus", BONUS),
            job("back", again, "back"),
            job("bfloat16", ("sft", "sft", "state", "begin_save", "finish_save", "sft", "sft", "export"), "bfloat16", BFLOAT16),
            job("fresh", ("begin_save", "finish_save", "sft", "load", *WHOLE), "fresh"),
        ],
    )


@pytest.fixture(scope="module")
def two(job: Any) -> Any:
    """The same by two tensor-parallel processes."""
    return run_layout(LAYOUTS["TP2"], [job("saved", SAVED, "two")])


@pytest.fixture(scope="module")
def halves(job: Any) -> Any:
    """And by two data-parallel ones, each of which writes a part; also with an optimizer of which each holds a part."""
    return run_layout(LAYOUTS["DP2"], [job("saved", SAVED, "halves"), job("split", SAVED, "split", distributed=True)])


@pytest.fixture(scope="module")
def resumed(one: Any, two: Any, halves: Any, job: Any, model: Path, root: Path) -> Any:
    """What other processes made of the saved states."""
    for name, damage in DAMAGES.items():
        shutil.copytree(root / "one", root / name)
        damage(root / name)
    wide = tiny.write_model(root / "wide", "qwen3", tied=True, vocab=VOCAB, intermediate_size=64)
    untied = tiny.write_model(root / "untied", "qwen3", tied=False, vocab=VOCAB, tie_word_embeddings=False)
    larger = tiny.write_model(root / "larger", "qwen3", tied=True, vocab=VOCAB + 1)
    on_one = [
        job("resumed", ("load", "draw", "load_reference", *REST, "reference"), "one"),
        job("bonus", ("load", "grpo", "grpo", "export"), "bonus", BONUS),
        job("again", ("load_again", *REST), "one"),
        job("from two", ("load", *REST), "two"),
        job("from halves", ("load", "load_reference", *REST, "reference"), "halves"),
        job("from split", ("load", *REST), "split"),
        job("to bfloat16", ("load", "state", "export"), "one", BFLOAT16),
        job("from bfloat16", ("load", "state", "export"), "bfloat16"),
        job("bfloat16", ("load", *REST), "bfloat16", BFLOAT16),
        job("damaged", (*(f"refuse {name}" for name in DAMAGES), "sft"), ""),
        job("wide", ("refuse one",), "", model=wide),
        job("untied", ("refuse one",), "", model=untied),
        job("larger", ("refuse one",), "", model=larger),
    ]
    found = {"TP1": run_layout(LAYOUTS["TP1"], on_one)}
    for layout in ("TP2", "DP2", "PP2"):
        jobs = [job("from one", ("load", *REST), "one"), job("from two", ("load", "draw", "load_reference", *REST, "reference"), "two")]
        if layout == "DP2":
            jobs.append(job("from halves", ("load", *REST), "halves"))
            jobs.append(job("split", ("load", *REST), "split", distributed=True))
            jobs.append(job("split from one", ("load", *REST), "one", distributed=True))
        found[layout] = run_layout(LAYOUTS[layout], jobs)
    return found


def test_an_entropy_bonus_that_adapts_goes_on(one: Any, resumed: Any) -> None:
    whole, again = one["bonus"][0], resumed["TP1"]["bonus"][0]
    assert [step["entropy_coef"] for step in whole["metrics"]] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert again["metrics"] == whole["metrics"][2:]
    for name, tensor in whole["weights"].items():
        assert torch.equal(again["weights"][name], tensor), name


def _truncate(directory: Path, name: str) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:-100])


def _zero(directory: Path) -> None:
    path = directory / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = {
    "short data": lambda directory: _truncate(directory, "__0_0.distcp"),
    "other data": _zero,
    "no data": lambda directory: (directory / "__0_0.distcp").unlink(),
    "short index": lambda directory: _truncate(directory, ".metadata"),
    "no index": lambda directory: (directory / ".metadata").unlink(),
    "no format": lambda directory: (directory / "metadata.json").unlink(),
    "short state": lambda directory: _truncate(directory, "state.json"),
    "no state": lambda directory: (directory / "state.json").unlink(),
    "other state": lambda directory: (directory / "state.json").write_text('{"format": 1, "surprise": 2}'),
}
BLAMED = {"data": "", "index": ".metadata", "state": "state.json", "format": ""}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_saving_does_not_change_training(one: Any) -> None:
    whole, saved = one["whole"][0], one["saved"][0]
    assert saved["metrics"] == whole["metrics"]
    assert len({step["lr"] for step in whole["metrics"]}) == 4  # a schedule that tells its steps apart
    assert_equal(saved["weights"], whole["weights"])


@pytest.mark.parametrize("name", ["resumed", "again"])
def test_a_resumed_run_is_equal_to_the_bit(one: Any, resumed: Any, name: str) -> None:
    whole, found = one["whole"][0], resumed["TP1"][name][0]
    assert found["loaded"] == {"weight_version": 7, "optimizer_steps": 2, "random_states": True}
    assert found["metrics"] == whole["metrics"][2:]
    assert_equal(found["weights"], whole["weights"])


def test_random_states_go_on(one: Any, two: Any, resumed: Any) -> None:
    assert torch.equal(resumed["TP1"]["resumed"][0]["drawn"], one["saved"][0]["drawn"])
    for found, saved in zip(resumed["TP2"]["from two"], two["saved"], strict=True):
        assert torch.equal(found["drawn"], saved["drawn"])
    assert not resumed["DP2"]["from two"][0]["loaded"]["random_states"]


def test_a_worker_goes_back_after_further_training(one: Any) -> None:
    """To its second save, whose memory the first one had used."""
    whole, back = one["whole"][0], one["back"][0]
    assert back["metrics"][:4] == whole["metrics"]
    assert back["metrics"][4:] == whole["metrics"][2:]
    assert_equal(back["weights"], whole["weights"])


def test_a_worker_goes_back_to_before_its_first_step(one: Any) -> None:
    whole, fresh = one["whole"][0], one["fresh"][0]
    assert fresh["metrics"][1:] == whole["metrics"]
    assert_equal(fresh["weights"], whole["weights"])


@pytest.mark.parametrize(("layout", "source"), [("TP2", "two"), ("DP2", "halves")])
def test_two_workers_go_on_equal_to_the_bit(two: Any, halves: Any, resumed: Any, layout: str, source: str) -> None:
    expected, mine = {"two": two, "halves": halves}[source]["saved"], resumed[layout][f"from {source}"]
    for found, saved in zip(mine, expected, strict=True):
        assert found["metrics"] == saved["metrics"][2:]
    assert_equal(mine[0]["weights"], expected[0]["weights"])


MOVES = [("TP1", "two"), ("TP1", "halves"), ("TP2", "one"), ("DP2", "one"), ("DP2", "two"), ("PP2", "one"), ("PP2", "two")]


@pytest.mark.parametrize(("layout", "source"), MOVES)
def test_another_layout_goes_on_within_rounding(one: Any, two: Any, halves: Any, resumed: Any, layout: str, source: str) -> None:
    saved, found = {"one": one, "two": two, "halves": halves}[source]["saved"][0], resumed[layout][f"from {source}"]
    for rank in found:
        assert rank["metrics"] == found[0]["metrics"]
        assert rank["loaded"]["optimizer_steps"] == 2
    for name, tensor in saved["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], tensor, atol=2e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    for mine, theirs in zip(found[0]["metrics"], saved["metrics"][2:], strict=True):
        assert mine["lr"] == theirs["lr"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6)


def test_an_optimizer_in_parts_goes_on_and_changes_hands(one: Any, halves: Any, resumed: Any) -> None:
    """Megatron's distributed optimizer, which GPUs have, and its plain one."""
    for found, saved in zip(resumed["DP2"]["split"], halves["split"], strict=True):
        assert found["metrics"] == saved["metrics"][2:]
    assert_equal(resumed["DP2"]["split"][0]["weights"], halves["split"][0]["weights"])
    for found, saved in ((resumed["DP2"]["split from one"], one["saved"]), (resumed["TP1"]["from split"], halves["split"])):
        for name, tensor in saved[0]["weights"].items():
            torch.testing.assert_close(found[0]["weights"][name], tensor, atol=2e-6, rtol=0)


def test_bfloat16_goes_on_to_the_bit(one: Any, resumed: Any) -> None:
    saved, found = one["bfloat16"][0], resumed["TP1"]["bfloat16"][0]
    assert found["metrics"] == saved["metrics"][2:]
    assert_equal(found["weights"], saved["weights"])


def test_float32_takes_the_masters_of_bfloat16(one: Any, resumed: Any) -> None:
    saved, found = one["bfloat16"][0], resumed["TP1"]["from bfloat16"][0]
    assert_equal(found["state"], saved["state"])
    assert all(tensor.dtype == torch.float32 for tensor in found["weights"].values())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in found["weights"].values())  # masters, not rounded weights


def test_bfloat16_takes_float32_as_masters(one: Any, resumed: Any) -> None:
    found = resumed["TP1"]["to bfloat16"][0]
    for name, master in found["state"].items():
        assert master.dtype == torch.float32, name
    assert any(not torch.equal(master, master.bfloat16().float()) for name, master in found["state"].items() if "fp32_param" in name)


def test_reference_weights_come_back(one: Any, two: Any, resumed: Any) -> None:
    for found, saved in ((resumed["TP1"]["resumed"], one), (resumed["TP2"]["from two"], two)):
        for key, row in saved["saved"][0]["reference_logprobs"].items():
            assert torch.equal(found[0]["reference_logprobs"][key], row)
    for layout in ("DP2", "PP2"):
        for key, row in two["saved"][0]["reference_logprobs"].items():
            torch.testing.assert_close(resumed[layout]["from two"][0]["reference_logprobs"][key], row, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_is_refused_by_name(resumed: Any, root: Path, name: str) -> None:
    message = resumed["TP1"]["damaged"][0][f"refuse {name}"]
    assert str(root / name) in message
    assert BLAMED[name.split()[1]] in message


def test_a_state_that_is_refused_changes_nothing(one: Any, resumed: Any) -> None:
    assert resumed["TP1"]["damaged"][0]["metrics"] == one["whole"][0]["metrics"][:1]


def test_another_model_is_refused_by_tensor_and_shape(resumed: Any) -> None:
    wide, untied, larger = (resumed["TP1"][name][0]["refuse one"] for name in ("wide", "untied", "larger"))
    assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight has shape [4, 96, 32], this model's has [4, 128, 32]" in wide
    assert "lacks optimizer.state.exp_avg.output_layer.weight" in untied
    assert "state.json: the vocabulary has 97 tokens, this model's has 98" in larger
