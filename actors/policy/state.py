"""What a policy worker must save to go on as if it had never stopped, independent of layout, device and dtype.

    parameter ──► float32 master, exp_avg, exp_avg_sq  ──copy──► host memory ──thread──► <directory>/__<rank>_0.distcp
    random states of this rank                         ──┘                   rank 0 ──► .metadata, metadata.json, state.json

The tensors have Megatron's names (`optimizer.state.fp32_param.decoder...`) and its format, so every layout can read them. Weights are
not stored beside their masters: they are the masters, rounded to the model's dtype (rounding.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from numpy.typing import NDArray

from actors.checkpoints.errors import CheckpointError
from actors.policy import random_states, sharded_files
from actors.policy.optimizer import loss_scale, set_loss_scale
from actors.policy.policy_state import STATE, LossScale, PolicyState
from actors.policy.sharded_files import ShardedFiles

MASTER = "fp32_param"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
_STATE_PREFIX, _REFERENCE_PREFIX = "optimizer.state", "reference"


@dataclass(frozen=True)
class Part:
    """What the optimizer of this rank holds of one parameter: elements `begin` to `end` of the flat parameter.

    Attributes:
        name: in the model's state dict of this rank.
        parameter: the model's own, [local shape], in its dtype.
        sharded: where it belongs in the whole model: Megatron's ShardedTensor, or a factory of several.
        master: float32 [end - begin] in some shape, which the optimizer updates; None: another data-parallel rank has all of it.
        optimizer: torch's (or Transformer Engine's), with the moments of `master`.
    """

    name: str
    parameter: torch.nn.Parameter
    sharded: Any
    begin: int
    end: int
    master: torch.Tensor | None
    optimizer: Any

    def value(self, kind: str) -> torch.Tensor | None:
        """The present master or moment, flat float32 [end - begin]; None: there are no moments yet (they are 0), or nothing is held."""
        if self.master is None:
            return None
        found = self.master if kind == MASTER else self.optimizer.state.get(self.master, {}).get(kind)
        return None if found is None else found.detach().reshape(-1)

    def restore(self, kind: str, full: torch.Tensor) -> None:
        """Take over a master or moment: float32 [local shape], on the CPU."""
        if kind == MASTER:
            self.parameter.copy_(full)
        if self.master is None:
            return
        mine = full.reshape(-1)[self.begin : self.end].reshape(self.master.shape)
        if kind == MASTER:
            if self.master is not self.parameter:
                self.master.copy_(mine)
            return
        moments = self.optimizer.state[self.master]
        if kind in moments:
            moments[kind].copy_(mine)
        else:
            moments[kind] = mine.to(self.master.device, copy=True)


def parts(model: Any, optimizer: Any) -> list[Part]:
    """All parameters of this rank, in the model's order.

    Args:
        model: Megatron's, not wrapped. optimizer: what `build_optimizer` made.
    """
    named = dict(model.named_parameters())
    sharded = get_param_id_to_sharded_param_map(model.sharded_state_dict(), named.values())
    held = {id(parameter): rest for one in optimizer.chained_optimizers for parameter, *rest in _held(one)}
    nothing = (0, 0, None, None)  # another rank's
    return [Part(name, parameter, sharded[i], *held.get(id(parameter), nothing)) for i, (name, parameter) in enumerate(named.items())]


def _held(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int, torch.Tensor, Any]]:
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            held = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, held.start, held.end, inner.param_groups[group]["params"][order], inner
        return
    pairs = [(parameter, parameter) for group in inner.param_groups for parameter in group["params"]]
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            (parameter, main)
            for groups in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
            for parameter, main in zip(*groups, strict=True)
        ] + [(parameter, parameter) for group in optimizer.fp32_from_fp32_groups for parameter in group]
    for parameter, main in pairs:
        yield parameter, 0, parameter.numel(), main, inner


def set_steps(optimizer: Any, scheduler: Any, steps: int) -> None:
    """Put Adam's bias correction and the schedule where they are after so many steps. At 0 there are no moments."""
    for inner in (one.optimizer for one in optimizer.chained_optimizers):
        if not steps:
            inner.state.clear()
        for group in inner.param_groups:
            if not isinstance(inner, torch.optim.Adam):  # AdamW is one; fused ones of other packages count by group
                group["step"] = steps
                continue
            for parameter in group["params"] if steps else ():
                on_device = group["capturable"] or group["fused"]
                inner.state[parameter]["step"] = torch.tensor(
                    float(steps), dtype=torch.float32, device=parameter.device if on_device else "cpu"
                )
    scheduler.num_steps = 0
    scheduler.step(steps)


class Saver:
    """Copies the state of this rank to host memory, and writes it from there while training goes on.

    The constructor is a collective. It allocates that memory, which each save reuses; a thread gives it its pages (for CUDA pinned ones:
    seconds for large models), for which the first save waits.
    """

    def __init__(self, model: Any, optimizer: Any, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        entries: dict[str, Any] = {}
        owned = self._owned(parts(model, optimizer))
        ends = list(accumulate(part.parameter.numel() for part in owned for _ in KINDS))
        # One block, so that it is pinned at once. numpy cuts it: each buffer has a storage of its own, where the writer would copy a view.
        memory = np.empty(ends[-1] if ends else 0, np.float32)
        blocks = iter(np.split(memory, ends))
        for part in owned:
            for kind in KINDS:
                self._buffers[part.name, kind] = buffer = torch.from_numpy(next(blocks)).view(part.parameter.shape)
                entries[f"{kind}.{part.name}"] = _entry(part, buffer, f"{_STATE_PREFIX}.{kind}", replica_id=0)
        self._random = {name: state.clone() for name, state in random_states.present(device).items()}
        self._files = ShardedFiles(entries | random_states.entries(self._random))
        pool = ThreadPoolExecutor(1, thread_name_prefix="policy-state-pages")
        self._pages = pool.submit(_take_pages, memory, device)
        pool.shutdown(wait=False)
        self._thread: threading.Thread | None = None
        self._results: list[Any] | None = None
        self._error: CheckpointError | None = None
        self._seconds, self._steps, self._roundings = 0.0, 0, 0
        self._loss_scale: LossScale | None = None
        self._adapted: dict[str, float] = {}

    def begin(self, model: Any, optimizer: Any, scheduler: Any, directory: str, adapted: dict[str, float], roundings: int = 0) -> None:
        """Copy the state, and begin to write it to the directory. A collective. `adapted`: `PolicyState.objective`.

        Args:
            roundings: `Rounding.count`.

        Raises:
            RuntimeError: the save before is still being written, or there is no memory for the copy.
        """
        if self.writing():
            raise RuntimeError("a save is still being written: wait for it before the next begins")
        self._pages.result()
        self._steps, self._roundings, self._loss_scale = int(scheduler.num_steps), roundings, loss_scale(optimizer)
        self._adapted = adapted
        present = parts(model, optimizer)
        owners = _owners(present)
        split = any(isinstance(one, DistributedOptimizer) for one in optimizer.chained_optimizers)
        split = split and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
        for part in present:
            if not _replicates(part):
                self._copy(part, owners[part.name], split)
        for name, state in random_states.present(self._device).items():
            self._random[name].copy_(state)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._results = self._error = None
        self._thread = threading.Thread(target=self._write, args=(directory,), name="policy-state", daemon=True)
        self._thread.start()

    def writing(self) -> bool:
        """Whether the thread is at it."""
        return self._thread is not None and self._thread.is_alive()

    def results(self) -> tuple[list[Any], float]:
        """What `finish` needs of this rank, and the seconds of writing.

        Raises:
            CheckpointError: it could not be written. RuntimeError: it is not written yet.
        """
        if self._error is not None:
            raise self._error
        if self._results is None:
            raise RuntimeError("no save was begun, or it is still being written")
        return self._results, self._seconds

    def finish(self, directory: str, results: list[list[Any]], weight_version: int, vocab_size: int) -> None:
        """Write what makes the ranks' files a saved policy; to be called on rank 0.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._files.finish(directory, results)
        state = PolicyState(
            weight_version=weight_version,
            optimizer_steps=self._steps,
            loss_scale=self._loss_scale,
            roundings=self._roundings,
            vocab_size=vocab_size,
            random_states=random_states.place(self._device),
            objective=self._adapted,
        )
        state.write(directory)

    def close(self, timeout_s: float) -> None:
        """Let a save that is being written end, but not for longer than this."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, directory: str) -> None:
        started = time.monotonic()
        try:
            self._results = self._files.write(directory)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  (raised by `results`)
            self._error = CheckpointError(f"{directory}: {type(error).__name__}: {error}")
        self._seconds = time.monotonic() - started

    def _copy(self, part: Part, owner: int, split: bool) -> None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        mine = torch.distributed.get_rank(group) == owner
        for kind in KINDS:
            value = part.value(kind)
            if split:
                value = _gathered(part, value, group, owner)
            if not mine:
                continue
            buffer = self._buffers[part.name, kind].view(-1)
            if value is None:
                buffer.zero_()
            else:
                buffer.copy_(value, non_blocking=True)

    def _owned(self, present: list[Part]) -> list[Part]:
        me = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        owners = _owners(present)
        return [part for part in present if not _replicates(part) and owners[part.name] == me]


def _take_pages(memory: NDArray[np.float32], device: torch.device) -> None:
    """Have the memory's pages mapped before the first save needs them. For CUDA they are pinned: copies to pageable memory are slow."""
    if device.type != "cuda" or not memory.size:
        memory.fill(0.0)
        return
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))


def load(model: Any, optimizer: Any, scheduler: Any, device: torch.device, directory: str, state: PolicyState) -> bool:
    """Take over a saved state, checked by `check`. Returns whether the random states came with it: they belong to a device and a layout.

    Raises:
        CheckpointError: the files cannot be read. Unless it was the first of them, the worker must not train on.
    """
    present = parts(model, optimizer)
    for kind in KINDS if state.optimizer_steps else KINDS[:1]:
        with torch.no_grad():
            for part, full in _read(directory, present, f"{_STATE_PREFIX}.{kind}", torch.float32):
                part.restore(kind, full)
    set_steps(optimizer, scheduler, state.optimizer_steps)
    set_loss_scale(optimizer, state.loss_scale)
    if same := state.random_states == random_states.place(device):
        random_states.restore(device, sharded_files.read(directory, random_states.entries(random_states.present(device))))
    return same


def check(model: Any, optimizer: Any, directory: str, vocab_size: int) -> PolicyState:
    """Whether this model can take over what was saved. Nothing is changed. A collective.

    Raises:
        CheckpointError: a file is missing or damaged, or the model that was saved has another shape; which tensor, and both shapes.
    """
    entries = {
        f"{kind}.{part.name}": _entry(part, torch.empty(part.parameter.shape, device="meta"), f"{_STATE_PREFIX}.{kind}")
        for part in parts(model, optimizer)
        for kind in KINDS
    }
    sharded_files.check(directory, entries, (f"{_STATE_PREFIX}.",))
    state = PolicyState.read(directory)
    if state.vocab_size != vocab_size:
        raise CheckpointError(f"{directory}/{STATE}: the vocabulary has {state.vocab_size} tokens, this model's has {vocab_size}")
    return state


def save_reference(model: Any, optimizer: Any, weights: list[torch.Tensor], directory: str) -> None:
    """Write reference weights: tensors in the order of the model's parameters. A collective, which waits until they are written."""
    present = parts(model, optimizer)
    owners, me = _owners(present), parallel_state.get_data_parallel_rank(with_context_parallel=True)
    files = ShardedFiles({
        part.name: _entry(part, kept.detach().cpu(), _REFERENCE_PREFIX, replica_id=0)
        for part, kept in zip(present, weights, strict=True)
        if not _replicates(part) and owners[part.name] == me
    })  # fmt: skip
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    try:
        mine: Any = files.write(directory)
    except CheckpointError as error:
        mine = error
    torch.distributed.all_gather_object(everyone, mine)
    for result in everyone:
        if isinstance(result, CheckpointError):
            raise result
    if torch.distributed.get_rank() == 0:
        files.finish(directory, everyone)


def load_reference(model: Any, optimizer: Any, directory: str) -> list[torch.Tensor]:
    """Reference weights as `save_reference` takes them, in the model's dtype and on its device. A collective.

    Raises:
        CheckpointError: as of `check`, and `load`.
    """
    present = parts(model, optimizer)
    entries = {part.name: _entry(part, part.parameter.detach(), _REFERENCE_PREFIX) for part in present}
    sharded_files.check(directory, entries, (f"{_REFERENCE_PREFIX}.",))
    dtype = present[0].parameter.dtype
    return [full.to(part.parameter.device) for part, full in _read(directory, present, _REFERENCE_PREFIX, dtype)]


def _read(directory: str, present: list[Part], prefix: str, dtype: torch.dtype) -> Iterator[tuple[Part, torch.Tensor]]:
    entries = {part.name: _entry(part, torch.empty(part.parameter.shape, dtype=dtype, device="cpu"), prefix) for part in present}
    found = sharded_files.read(directory, entries)
    for part in present:
        yield part, found[part.name]


def _entry(part: Part, tensor: torch.Tensor, prefix: str, replica_id: int | None = None) -> Any:
    sharded = part.sharded if replica_id is None else replace(part.sharded, replica_id=replica_id)
    return make_sharded_optimizer_tensor(sharded, tensor, prefix)


def _replicates(part: Part) -> bool:
    """Whether a rank of another tensor- or pipeline-parallel place has the same tensor, and writes it."""
    return any(part.sharded.replica_id[:-1])


def _owners(present: list[Part]) -> dict[str, int]:
    """By name the data-parallel rank that writes a parameter: all write about as much."""
    loads = [0] * parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    owners = {}
    for part in present:
        if not _replicates(part):
            owners[part.name] = least = loads.index(min(loads))
            loads[least] += part.parameter.numel()
    return owners


def _gathered(part: Part, value: torch.Tensor | None, group: Any, owner: int) -> torch.Tensor:
    """The whole flat parameter's value, on the owner: the data-parallel ranks hold ranges of it."""
    full = torch.zeros(part.parameter.numel(), device=part.parameter.device)
    if value is not None:
        full[part.begin : part.end] = value
    torch.distributed.reduce(full, group=group, group_dst=owner)
    return full
