"""What an engine does with a `Transfer` and with sleep, seen without vLLM: a stand-in for the executor loads the pieces."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

from actors.generation.engine import Engine
from actors.generation.types import EngineFailedError, GenerationRequest, RequestError, UpdateOptions, WeightUpdate
from actors.generation.versions import TokenVersions
from actors.refit.ipc import buffer_bytes, pieces
from actors.refit.manifest import Manifest, WeightLayout, WeightMismatchError
from actors.refit.nccl import Nccl, broadcast_bytes, broadcast_pieces
from actors.refit.transport import RefitPlan, Transfer
from configs import settings
from configs.rollout import GenerationConfig
from tests.patience import WAIT_S

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(5)}
MANIFEST = Manifest.of(WEIGHTS.items())


class Loads:
    """Remembers what it was given."""

    max_model_len, vocab_size, updating, asleep = 16, 8, "", False

    def __init__(self) -> None:
        self.versions = TokenVersions()
        self.loaded: list[dict[str, Any]] = []
        self.said: list[str] = []

    def load(self, infos: Any, version: int, options: Any, timeout_s: float) -> float:
        self.loaded.extend(infos)
        self.asleep = False
        return 0.25

    def died(self) -> bool:
        return False

    def start(self, jobs: Any) -> None:
        self.said.append("start")

    def sleep(self, level: int, timeout_s: float) -> None:
        self.said.append(f"sleep {level}")
        self.asleep = True

    def wake_up(self, timeout_s: float) -> None:
        self.said.append("wake up")
        self.asleep = False


def engine(refit: str = "ipc", **changes: Any) -> tuple[Engine, Loads]:
    """As `start` would leave it."""
    made, loads = Engine(GenerationConfig.model_validate({"timeout_s": 5.0, "refit": refit} | changes), "nowhere", 0, [1]), Loads()
    made._executor, made._state = loads, "ready"  # type: ignore[assignment]
    made._layout = WeightLayout({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}, tied=False)
    made._job = lambda key, *_: SimpleNamespace(key=key)  # type: ignore[assignment]
    made._sampling = SimpleNamespace(check_requests=lambda *_: None, sampling_params=lambda *_: None)  # type: ignore[assignment]
    return made, loads


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def test_pieces_are_loaded_in_order_and_each_feed_returns_when_its_piece_is(pool: ThreadPoolExecutor) -> None:
    made, loads = engine()
    transfer = Transfer(MANIFEST, 64)
    update: Future[WeightUpdate] = pool.submit(made.update_weights, transfer, 1, UpdateOptions())
    for names in (["a", "b"], ["c"]):
        made.feed(transfer.id, {"names": names})
    assert update.result(WAIT_S) == WeightUpdate(bytes=(6 + 4 + 5) * 4, pause_s=0.25)
    assert loads.loaded == [{"names": ["a", "b"]}, {"names": ["c"]}]
    with pytest.raises(RuntimeError, match="the update has ended"):
        made.feed(transfer.id, {"names": ["d"]})


def test_a_broadcast_is_one_piece_that_says_what_comes() -> None:
    made, loads = engine("nccl")
    made.update_weights(Transfer(MANIFEST, 64), 1, UpdateOptions())
    (info,) = loads.loaded
    assert info["names"] == ["a", "b", "c"]
    assert info["shapes"] == [[2, 3], [4], [5]]
    assert info["dtype_names"] == ["float32"] * 3
    assert (info["packed"], info["packed_buffer_size_bytes"]) == (True, 64)


def test_a_manifest_that_does_not_fit_frees_the_sender(pool: ThreadPoolExecutor) -> None:
    made, loads = engine()
    transfer = Transfer(Manifest.of({"a": torch.zeros(2, 3)}.items()), 64)
    feeding = pool.submit(made.feed, transfer.id, {"names": ["a"]})
    with pytest.raises(WeightMismatchError, match="lacks weight 'b'"):
        made.update_weights(transfer, 1, UpdateOptions())
    with pytest.raises(RuntimeError, match="lacks weight 'b'"):
        feeding.result(WAIT_S)
    assert loads.loaded == []
    assert made.health().state == "ready"


def test_a_policy_that_gives_up_ends_the_update_at_once(pool: ThreadPoolExecutor) -> None:
    made, _ = engine()
    transfer = Transfer(MANIFEST, 64)
    update = pool.submit(made.update_weights, transfer, 1, UpdateOptions())
    made.feed(transfer.id, {"names": ["a"]})
    made.abandon_transfer(transfer.id, "out of memory")
    with pytest.raises(EngineFailedError, match="out of memory"):  # it holds a mixture of weights
        update.result(WAIT_S)


def test_a_sleeping_engine_wakes_for_a_request_if_it_kept_its_weights() -> None:
    made, loads = engine(sleep_level=1)
    made.sleep()
    made.sleep()
    made.submit("client", [GenerationRequest("r", [1], 1, 1.0, 1.0, 0)])
    assert loads.said == ["sleep 1", "wake up", "start"]
    with pytest.raises(RuntimeError, match="1 requests run"):
        made.sleep()


def test_an_engine_without_weights_wants_a_refit_first() -> None:
    made, loads = engine("nccl", sleep_level=2)
    made.sleep()
    with pytest.raises(RequestError, match="refit it first"):
        made.submit("client", [GenerationRequest("r", [1], 1, 1.0, 1.0, 0)])
    made.update_weights(Transfer(MANIFEST, 64), 1, UpdateOptions())  # loading wakes it
    made.submit("client", [GenerationRequest("r", [1], 1, 1.0, 1.0, 0)])
    assert loads.said == ["sleep 2", "start"]


def test_before_the_first_refit_an_engine_sleeps_with_its_weights() -> None:
    made, loads = engine("nccl", sleep_level=2)
    made.sleep(keep_weights=True)
    made.submit("client", [GenerationRequest("r", [1], 1, 1.0, 1.0, 0)])
    assert loads.said == ["sleep 1", "wake up", "start"]


def test_an_engine_that_was_not_built_to_sleep_says_so() -> None:
    with pytest.raises(RuntimeError, match="sleep_level is 0"):
        engine()[0].sleep()


def test_the_ipc_buffer_holds_the_largest_weight_and_is_no_larger_than_all() -> None:
    assert buffer_bytes(Transfer(MANIFEST, 1)) == 6 * 4
    assert buffer_bytes(Transfer(MANIFEST, 32)) == 32
    assert buffer_bytes(Transfer(MANIFEST, 2**30)) == 15 * 4


ANY_WEIGHTS = st.builds(
    lambda shapes, dtype: {f"w{row}": torch.randn(shape).to(dtype) for row, shape in enumerate(shapes)},
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@given(ANY_WEIGHTS, st.integers(0, 400))
def test_pieces_are_read_as_the_weights_that_were_laid_down(weights: dict[str, torch.Tensor], room: int) -> None:
    largest = max(tensor.nbytes for tensor in weights.values())
    buffer, read, most = torch.empty(largest + room, dtype=torch.uint8), {}, 0
    for info in pieces(iter(weights.items()), buffer):
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        content = buffer[: sum(info["tensor_sizes"])]
        found = unpack_tensor(content, info["names"], info["shapes"], dtypes, info["tensor_sizes"])
        read.update({name: tensor.clone() for name, tensor in found})
        most = max(most, len(content))
    assert list(read) == list(weights)
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert most + largest > len(buffer) or most == sum(tensor.nbytes for tensor in weights.values())  # pieces are as large as they can be


@pytest.mark.filterwarnings("ignore:Tensor .* which exceeds buffer_size_bytes:UserWarning")  # vLLM's
@given(ANY_WEIGHTS, st.integers(1, 600))
def test_a_broadcast_s_pieces_are_those_of_vllm(weights: dict[str, torch.Tensor], limit: int) -> None:
    buffer = torch.empty(broadcast_bytes(Transfer(Manifest.of(weights.items()), limit)), dtype=torch.uint8)
    sent = [piece.clone() for piece in broadcast_pieces(iter(weights.items()), buffer, limit)]
    left = iter(weights.items())
    expected = list(iter(lambda: pack_tensors(left, lambda item: item[1], limit), None))
    assert len(sent) == len(expected)
    assert all(torch.equal(piece, chunk.packed_tensor) for piece, chunk in zip(sent, expected, strict=True))


def test_a_weight_that_does_not_fit_the_buffer_is_named() -> None:
    with pytest.raises(ValueError, match="weight 'b' has 16 bytes, the buffer 15"):
        list(pieces(iter({"a": torch.zeros(2), "b": torch.zeros(4)}.items()), torch.empty(15, dtype=torch.uint8)))


def test_the_broadcast_is_joined_anew_when_an_engine_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, joined = Nccl(5.0), []
    transport._manifest = MANIFEST

    def connect(ranks: int, workers: Any, namespace: str, engines: dict[str, str]) -> None:
        joined.append(dict(engines))
        transport._joined = dict(engines)

    monkeypatch.setattr(transport, "_connect", connect)
    before, after = {"engine-0": "a", "engine-1": "b"}, {"engine-0": "a", "engine-1": "c"}
    for engines in (before, before, after, after):
        transport.offer(RefitPlan("nccl"), {}, "nowhere", engines)
    assert joined == [before, after]


def test_an_engine_joins_by_the_policys_invitation() -> None:
    """NCCL's id travels as an argument of a Ray call: there is no store to write into. NCCL itself needs GPUs (tests/gpu/test_refit.py)."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    with settings.variables(NCCL_SOCKET_IFNAME="lo"):  # it listens for those that it invites, as long as this process lives
        invitation, other = (Nccl(5.0).invite(SimpleNamespace(call_on_device=lambda call: call())) for _ in range(2))
    assert invitation != other
    engine: Any = Nccl.vllm_engine()
    info = engine.init_info_cls(**{"invitation": invitation, "world_size": 2, "rank_offset": 1})
    assert bytes(NCCLLibrary().unique_id_from_bytes(info.invitation).internal) == invitation
