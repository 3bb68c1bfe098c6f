"""Passes over micro-batches as CUDA graphs: captured once per shape, then replayed.

    micro-batch ── shape seen? ── fewer than warmup_steps times ──► eager, on the capture stream
                                  then, once ────────────────────► capture: every launch of the pass, its memory from one pool of all graphs
                                  from then on ──────────────────► copy into the graph's inputs ──► replay ──► copies of its outputs

One graph holds one micro-batch: forward, loss, and backward into the gradient buffers. Neither the number of micro-batches nor their
order is part of a shape. What a step does once stays outside: zeroing and reducing gradients, and the optimizer. Graphs hold addresses of
parameters and gradient buffers: when one has moved, all are captured anew.

Megatron-Core's FullCudaGraphWrapper does this for one shape per process; its capture stream is used here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from actors.policy.batch import MicroBatch

# The pass over one micro-batch, and what it returns. Without host reads: only what happens on the device is replayed.
Pass = Callable[[MicroBatch], torch.Tensor]

# Where graphs are captured, TransformerConfig gets the first and model_parallel_cuda_manual_seed the second. Never one alone: the model
# forks the random-number tracker that the seeding made.
MODEL_OPTIONS: dict[str, Any] = {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": [], "use_te_rng_tracker": True}
SEED_OPTIONS = {"te_rng_tracker": True, "use_cudagraphable_rng": True}

_log = logging.getLogger(__name__)


@contextmanager
def capture_stream(device: torch.device) -> Iterator[None]:
    """Megatron-Core's stream for captures, ordered after what is queued on the current stream and before what follows.

    Autograd runs a parameter's gradient node on the stream where it was made. Nodes that a graph captures must be made here: the legacy
    default stream cannot take part in a capture.
    """
    from megatron.core.full_cuda_graph import get_shared_capture_stream

    outer, stream = torch.cuda.current_stream(device), get_shared_capture_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


@dataclasses.dataclass
class _Graph:
    """One shape: its eager passes so far; once captured, its graph and the tensors that the graph reads and writes."""

    eager_runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: MicroBatch | None = None
    output: torch.Tensor | None = None


class GraphCache:
    """Graphs by stage and shape, for one worker on one device.

    Args:
        warmup_steps: eager passes of a shape before its capture, in which libraries allocate memory and choose kernels.
        device: where passes run; on a CPU all are eager, and counted.
        anchors: parameters and gradient buffers: tensors whose addresses graphs hold.
    """

    def __init__(self, warmup_steps: int, device: torch.device, anchors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._warmup_steps, self._device, self._anchors = warmup_steps, device, anchors
        self._graphs: dict[Any, _Graph] = {}
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None
        self._counts = dict.fromkeys(("replays", "captures", "eager", "dropped"), 0)

    def describe(self) -> str:
        """What is done, for the start-up line."""
        return "CUDA graphs" if self._device.type == "cuda" else "CUDA graphs asked for, but the policy is on a CPU: all passes are eager"

    def begin(self) -> None:
        """To be called before the passes of a stage: drops the graphs when an anchor has moved."""
        addresses = tuple(tensor.data_ptr() for tensor in self._anchors())
        if self._graphs and addresses != self._addresses:
            _log.warning("policy.cuda_graph: weights or gradient buffers moved: %d shapes are captured anew", len(self._graphs))
            self._counts["dropped"] += sum(entry.graph is not None for entry in self._graphs.values())
            self.clear()
        self._addresses = addresses

    def run(self, stage: str, batch: MicroBatch, call: Pass) -> torch.Tensor:
        """`call(batch)`, eager or replayed. No later call writes to the result.

        Args:
            stage: name of the computation: the same for all calls with this stage and shapes.

        Raises:
            RuntimeError: the pass cannot be captured; the message says how to go on without graphs.
        """
        if self._device.type == "cpu":
            self._counts["eager"] += 1
            return call(batch)
        tensors = batch.tensors()
        shape = frozenset((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        entry = self._graphs.setdefault((stage, shape), _Graph())
        with capture_stream(self._device):
            if entry.eager_runs < self._warmup_steps:
                entry.eager_runs += 1
                self._counts["eager"] += 1
                return call(batch)
            if entry.graph is None:
                self._capture(entry, stage, batch, call)
            assert entry.graph is not None and entry.inputs is not None and entry.output is not None  # noqa: PT018
            for name, tensor in entry.inputs.tensors().items():
                tensor.copy_(tensors[name])
            entry.graph.replay()
            self._counts["replays"] += 1
            return entry.output.clone()

    def counts(self) -> dict[str, float]:
        """Counts since the last call, as step metrics: cuda_graph/replays, /captures, /eager (passes without a graph), /dropped (moved)."""
        counted = {f"cuda_graph/{name}": float(value) for name, value in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counted

    def clear(self) -> None:
        """Drop all graphs and their memory. To be called before the process group ends: graphs hold its collectives."""
        self._graphs.clear()
        self._pool = None  # the next capture takes a new one: torch refuses a pool whose last graph is gone

    def _capture(self, entry: _Graph, stage: str, batch: MicroBatch, call: Pass) -> None:
        from megatron.core.full_cuda_graph import get_shared_capture_stream
        from megatron.core.tensor_parallel.random import get_all_rng_states

        inputs = batch.clone()
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # thread_local: other threads of this process (NCCL's watchdog) may ask about their events meanwhile.
        options = {"pool": self._pool, "stream": get_shared_capture_stream(), "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **options):
                output = call(inputs)
        except RuntimeError as error:
            raise RuntimeError(
                f"policy.cuda_graph: the {stage} pass over a micro-batch of shape {list(batch.input_ids.shape)} cannot be captured "
                f"({str(error).splitlines()[0]}): set policy.cuda_graph.impl=none"
            ) from error
        entry.graph, entry.inputs, entry.output = graph, inputs, output
        self._counts["captures"] += 1
