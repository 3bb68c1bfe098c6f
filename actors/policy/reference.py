"""The reference policy, whose log-probabilities the KL term reads.

Snapshot   weights that the policy had at some time ── swapped into its model for a pass
Teachers   other models, of any size, beside the policy's in the same layout ── passes of their own, forward only

    rows of source a ──► teacher of a ──┐
    rows of source b ──► teacher of b ──┴─► columns of all rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from actors.data_plane.meta import KVBatchMeta
from actors.data_plane.sharding import ShardPlan
from actors.models.hf import check_teacher_dir
from actors.policy.batch import CANDIDATES
from actors.policy.logprob import Top
from actors.policy.passes import Passes
from configs.policy import PolicyConfig

BySource = Mapping[str, Passes]  # whose passes say how probable responses to a source's prompts are; "": to those of all others


class Snapshot:
    """A copy of the model's present weights, or those given.

    Args:
        model: Megatron's, not wrapped; `passes` are its own. weights: in the order of its parameters, in its dtype and on its device.
    """

    def __init__(self, model: Any, passes: Passes, weights: list[torch.Tensor] | None = None) -> None:
        self._model, self._passes = model, passes
        self.weights = weights or [parameter.detach().clone() for parameter in model.parameters()]

    @contextmanager
    def passes(self) -> Iterator[BySource]:
        """Passes with these weights, for every source, inside the block only."""
        self.swap()
        try:
            yield {"": self._passes}
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange them with the model's."""
        with torch.no_grad():
            for parameter, kept in zip(self._model.parameters(), self.weights, strict=True):
                present = parameter.detach().clone()
                parameter.copy_(kept)
                kept.copy_(present)


class Teachers:
    """Models of their own, by the source whose prompts they teach. Needs Megatron's parallel groups; a collective to build.

    Args:
        directories: of the models, by source; "": the teacher of all others. A directory that comes again is one model.
        vocabulary: of the policy: with policy.teacher.top_k teachers name tokens that it and all of them have.
        thd: as of `Passes`. graphs: whether the policy's passes are captured as CUDA graphs; the teachers' are eager.

    Attributes:
        candidates: how many tokens they name at each position.

    Raises:
        ConfigError: a model that cannot be read, or split into this layout.
    """

    def __init__(
        self, directories: Mapping[str, str], vocabulary: int, config: PolicyConfig, device: torch.device, *, thd: bool, graphs: bool
    ) -> None:
        from actors.models.weight_table import load_hf
        from actors.policy.model import build_model

        models = {path: check_teacher_dir(path, source) for source, path in directories.items()}
        shared = min(vocabulary, *(hf.vocab_size for hf in models.values()))
        self.candidates = config.teacher.candidates(shared) if config.teacher else 0
        top = Top(self.candidates, shared) if self.candidates else None
        vary, dtype, built = config.batching.mode == "dynamic", getattr(torch, config.dtype), {}
        for path, hf in models.items():
            model = build_model(hf, config.parallel, dtype, device, shapes_vary=vary, graphs=graphs)
            load_hf(model, path, hf)
            built[path] = Passes(model.requires_grad_(False), hf.vocab_size, config, device, thd=thd, captured=False, top=top)
        self._passes = {source: built[path] for source, path in directories.items()}

    @contextmanager
    def passes(self) -> Iterator[BySource]:
        """Theirs."""
        yield self._passes


def shares(
    plan: ShardPlan, by_source: BySource, replan: Callable[[KVBatchMeta], ShardPlan]
) -> Iterator[tuple[Passes, ShardPlan, list[int]]]:
    """Whose passes go over which rows: the plan for them, and their numbers in `plan`. Rows whose source has none are in no share.

    Args:
        replan: a plan for some of the rows, where a model has not all.
    """
    sources = [tag.get("source", "") for tag in plan.meta.tags]
    answering = [by_source.get(source, by_source.get("")) for source in sources]
    for passes in dict.fromkeys(by_source.values()):
        rows = [row for row, found in enumerate(answering) if found is passes]
        if len(rows) == len(answering):
            yield passes, plan, rows
        elif rows:
            yield passes, replan(plan.meta.subset(rows)), rows


def columns_of(values: torch.Tensor, column: str) -> dict[str, torch.Tensor]:
    """From what a pass gives of each token, [n, S, L] (passes.py), to columns: log-probabilities and, of a teacher's, its candidates."""
    found, several = {column: values[0]}, values[2:].movedim(0, -1)
    if several.shape[-1]:
        ids, logprobs = several.chunk(2, dim=-1)
        found |= dict(zip(CANDIDATES, (ids.int(), logprobs), strict=True))
    return found
