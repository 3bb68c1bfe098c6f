"""Questions to token ids, once. What the model generates is never tokenised again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from actors.environments import Problem, Split


class Problems(Protocol):
    """Numbered problems in two splits: an environment, or a data set."""

    def size(self, split: Split) -> int:
        """How many problems the split has."""

    def problem(self, split: Split, index: int) -> Problem:
        """Problem number `index` of the split; the same for the same arguments."""


class PromptEncoder:
    """Applies the tokenizer's chat template; a tokenizer without one gets the question and a newline."""

    def __init__(self, model_path: str, system_prompt: str | None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path)
        self._system_prompt = system_prompt

    def prompt(self, problem: Problem) -> list[int]:
        """Token ids up to where the response begins."""
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages.append({"role": "user", "content": problem.question})
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode("\n".join(message["content"] for message in messages) + "\n")
        ids: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def answer(self, problem: Problem) -> list[int]:
        """Token ids of a correct response, with the end token, for supervised steps."""
        return [*self.tokenizer.encode(problem.answer, add_special_tokens=False), self.tokenizer.eos_token_id]

    def text(self, token_ids: list[int]) -> str:
        """What a person reads; special tokens are left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def end_token_ids(model_path: str) -> list[int]:
    """Tokens that end a response: the tokenizer's own, and those of generation_config.json (Llama 3 has several)."""
    ends = {int(AutoTokenizer.from_pretrained(model_path).eos_token_id)}
    try:
        more = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        more = None  # the file is optional
    ends.update(more if isinstance(more, list) else [more] if more is not None else [])
    return sorted(ends)


def data_order(size: int, seed: int) -> Iterator[tuple[int, int]]:
    """(epoch, problem number) without end: each epoch is one seeded permutation of all problems."""
    epoch = 0
    while True:
        for index in np.random.default_rng((seed, epoch)).permutation(size):
            yield epoch, int(index)
        epoch += 1


class PromptStream:
    """The training prompts in their seeded order, `size` an epoch. `position` says how many were drawn."""

    def __init__(self, problems: Problems, seed: int) -> None:
        self._problems = problems
        self.size = problems.size("train")
        self._order = data_order(self.size, seed)
        self.position = 0

    def draw(self, count: int) -> list[tuple[str, Problem]]:
        """The next `count` prompts, each with a uid that is unique within the run."""
        drawn = []
        for _ in range(count):
            epoch, index = next(self._order)
            self.position += 1
            drawn.append((f"{epoch}.{index}", self._problems.problem("train", index)))
        return drawn
