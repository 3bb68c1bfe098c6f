"""Python's garbage collector in processes that live as long as a run.

A full collection visits every object of a process: several hundred thousand once vLLM or Megatron are imported, which takes tenths of a
second, and happens again and again in processes that make many objects. Meanwhile no thread of the process runs: an engine actor
neither hands out tokens nor resumes after a refit.
"""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Later collections leave alone what is there now. To be called once an actor is ready: what its start has made stays to its end.

    vLLM does the same in processes of its own (vllm.utils.gc_utils.freeze_gc_heap). What is to be freed later must not be part of a cycle.

    What was frozen before stays so. In a fork that is all that its server has imported (actors/forks): to visit it takes time, and
    copies memory that the processes share.
    """
    gc.collect()  # else cycles that are garbage already would stay, too
    gc.freeze()
