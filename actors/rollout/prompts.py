"""From problems to prompts: their tokens, once, and the order in which they are drawn.

    Problems ──epoch_order or the source's own──► PromptStream ──PromptEncoder──► fits? ──► DrawnPrompt(uid, problem, token ids)
                                                      ▲                            └► refused, dropped or truncated
                                     level of the curriculum ◄── accuracy of scored groups

What the model generates is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from actors.environments import Problem, Split
from actors.environments.dataset.problems import prompt_digest
from actors.rollout.curriculum import Curriculum
from configs.base import ConfigError
from configs.curriculum import CurriculumConfig

OnTooLong = Literal["refuse", "drop", "truncate"]
LEVEL = "curriculum_level"  # the column of a problem that says at which level it was drawn

# Arguments of PreTrainedTokenizerBase.apply_chat_template that say what it returns, which is fixed here.
_NO_TEMPLATE_KWARGS = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
_STREAMED_PATIENCE = 20_000  # prompts; where no epoch is known


class Problems(Protocol):
    """Numbered problems in two splits: an environment, or a data set."""

    def size(self, split: Split) -> int:
        """How many problems the split has."""

    def problem(self, split: Split, index: int) -> Problem:
        """Problem number `index` of the split; the same for the same arguments."""


@runtime_checkable
class StreamedProblems(Problems, Protocol):
    """Training problems one after the other, from a source too large to number. `size("train")` is not asked for."""

    def next_train(self) -> Problem:
        """The next training problem, without end, in the source's own order."""

    def stream_state(self) -> dict[str, Any]:
        """Where the stream stands; JSON."""

    def restore_stream(self, state: dict[str, Any]) -> None:
        """Go on where `stream_state` was taken."""


@runtime_checkable
class LeveledProblems(Problems, Protocol):
    """Problems that can be made easier or harder."""

    @property
    def levels(self) -> int:
        """How many levels of difficulty there are."""

    def problem_at(self, level: int, split: Split, index: int) -> Problem:
        """Problem number `index` of the split, at a level from 0."""


class PromptTooLongError(ConfigError):
    """A prompt leaves no room for a response, or none does not."""


class PromptEncoder:
    """Applies the tokenizer's chat template; a tokenizer without one gets the contents of the messages, a newline after each.

    Args:
        system_prompt: sent first, unless the problem's chat has a system message of its own.
        chat_template_kwargs: more arguments of apply_chat_template, for example {"enable_thinking": False}.

    Raises:
        ConfigError: chat_template_kwargs that cannot be set, or without a chat template.
    """

    def __init__(self, model_path: str, system_prompt: str | None, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path)
        self._system_prompt = system_prompt
        self._template_kwargs = dict(chat_template_kwargs or {})
        if taken := sorted(_NO_TEMPLATE_KWARGS & self._template_kwargs.keys()):
            raise ConfigError(f"environment.chat_template_kwargs: {taken[0]!r} cannot be set: the prompt ends where the response begins")
        if self._template_kwargs and self.tokenizer.chat_template is None:
            raise ConfigError(f"environment.chat_template_kwargs: the tokenizer in {model_path} has no chat template: leave them out")

    def prompt(self, problem: Problem) -> list[int]:
        """Token ids up to where the response begins.

        Raises:
            ConfigError: the chat template or the tokenizer does not take the messages; names the problem.
        """
        messages = self._messages(problem)
        try:
            if self.tokenizer.chat_template is None:
                ids: Any = self.tokenizer.encode("\n".join(message["content"] for message in messages) + "\n")
            else:
                ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **self._template_kwargs)
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"{_named(problem)}: the model's tokenizer does not take its messages ({roles}): {error}") from error
        return list(ids)

    def answer(self, problem: Problem) -> list[int]:
        """Token ids of a correct response, with the end token, for supervised steps."""
        return [*self.tokenizer.encode(problem.answer, add_special_tokens=False), self.tokenizer.eos_token_id]

    def text(self, token_ids: list[int]) -> str:
        """What a person reads; special tokens are left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        own = [{"role": "user", "content": problem.question}] if problem.messages is None else list(problem.messages)
        if self._system_prompt and not any(message["role"] == "system" for message in own):
            own.insert(0, {"role": "system", "content": self._system_prompt})
        return own


def end_token_ids(model_path: str) -> list[int]:
    """Tokens that end a response: the tokenizer's own, and those of generation_config.json (Llama 3 has several)."""
    ends = {int(AutoTokenizer.from_pretrained(model_path).eos_token_id)}
    try:
        more = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        more = None  # the file is optional
    ends.update(more if isinstance(more, list) else [more] if more is not None else [])
    return sorted(ends)


def fit(problem: Problem, token_ids: list[int], room: int, on_too_long: OnTooLong) -> list[int] | None:
    """The prompt's tokens, at most `room` of them; None: it is too long, and dropped.

    Truncated means the last `room` tokens: the chat header and the system prompt are lost (as with verl's truncation=left).

    Raises:
        PromptTooLongError: it is too long, and must not be; names the prompt.
    """
    if len(token_ids) <= room:
        return token_ids
    if on_too_long == "refuse":
        raise PromptTooLongError(
            f"{_named(problem)} has {len(token_ids)} tokens, and beside a response there is room for {room}: shorten it, "
            "lower rollout.max_new_tokens (evaluate: sampling.max_new_tokens), take a model with a longer context, or set "
            "environment.on_too_long to drop or truncate. "
            f"It begins {problem.question[:60]!r}"
        )
    return None if on_too_long == "drop" else token_ids[len(token_ids) - room :]


def _named(problem: Problem) -> str:
    return f"environment: prompt {problem.uid}" + (f" of {problem.source}" if problem.source else "")


@lru_cache(maxsize=1)
def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """Problem numbers in the order of the epoch, int64 [size]: one seeded permutation of all."""
    return np.random.default_rng((seed, epoch)).permutation(size)


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt to answer.

    Attributes:
        uid: unique within the run; which row it is, `problem.uid` says.
        token_ids: at most as many as there is room for.
    """

    uid: str
    problem: Problem
    token_ids: list[int]


class PromptStream:
    """The training prompts without end: numbered ones in their seeded order, streamed ones in the source's. Call from one thread.

    Args:
        encoder, room: for `draw_encoded`: most tokens of a prompt.
        on_too_long: what becomes of a longer one.
        curriculum: the problems are drawn at the level that it says.
        held_out: digests of prompts that `draw_encoded` drops: those of further validation sets.

    Attributes:
        size: prompts of an epoch; None: streamed.
        position: prompts taken from the source, the dropped ones included. dropped, truncated: how many of them were too long.
        patience: so many prompts in a row of which none is usable are an error; a whole epoch lies within them.

    Raises:
        ConfigError: a curriculum of problems that have no levels, or of levels that they do not have.
    """

    def __init__(
        self,
        problems: Problems,
        seed: int,
        *,
        encoder: PromptEncoder | None = None,
        room: int | None = None,
        on_too_long: OnTooLong = "refuse",
        curriculum: CurriculumConfig | None = None,
        held_out: Collection[bytes] = (),
    ) -> None:
        self._problems, self._seed, self._held_out = problems, seed, held_out
        self._encoder, self._room, self._on_too_long = encoder, room, on_too_long
        self._streamed = problems if isinstance(problems, StreamedProblems) else None
        self.size = problems.size("train") if self._streamed is None else None
        self.patience = _STREAMED_PATIENCE if self.size is None else 2 * self.size
        self.position = self.dropped = self.truncated = 0
        self._curriculum: Curriculum | None = None
        if curriculum is not None:
            if not isinstance(problems, LeveledProblems):
                raise ConfigError(
                    "environment.curriculum: these problems have no levels of difficulty: use kind reasoning_gym, or leave it out"
                )
            self._leveled, self._curriculum = problems, Curriculum(curriculum, problems.levels)

    def draw(self, count: int) -> list[tuple[str, Problem]]:
        """The next `count` problems, however long, each with a uid that is unique within the run."""
        return [self._next() for _ in range(count)]

    def draw_encoded(self, count: int) -> list[DrawnPrompt]:
        """The next `count` prompts that fit.

        Raises:
            PromptTooLongError: one does not fit and is refused, or `patience` in a row were dropped.
            ConfigError: the chat template does not take one.
        """
        none_fits = PromptTooLongError(
            f"environment: none of the last {self.patience} prompts has at most {self._room} tokens, so all were dropped: shorten "
            "them, lower max_new_tokens, take a model with a longer context, or set environment.on_too_long=truncate"
        )
        return self.draw_kept(count, self._encoded, none_fits)

    def draw_kept[T](self, count: int, read: Callable[[str, Problem], T | None], none_kept: Exception) -> list[T]:
        """What `read` makes of the next problems and their uids, until there are `count`; None: it drops the problem.

        Raises:
            What `read` raises; `none_kept`: it dropped `patience` in a row.
        """
        kept: list[T] = []
        last = self.position
        while len(kept) < count:
            one = read(*self._next())
            if one is not None:
                kept.append(one)
                last = self.position
            elif self.position - last >= self.patience:
                raise none_kept
        return kept

    def number(self, uid: str) -> int | None:
        """The number, in its split, of the problem that was drawn as `uid`; None: it was streamed, and cannot be asked for again."""
        return None if self._streamed is not None else int(uid.rpartition(".")[2])

    def again(self, number: int, level: int | None) -> Problem:
        """A numbered problem as it was drawn, at the level of the curriculum then.

        Raises:
            IndexError: there is no such problem, or it is not drawn at such a level.
        """
        levels = (None,) if self._curriculum is None else range(self._leveled.levels)
        if self.size is None or number >= self.size or level not in levels:
            raise IndexError(number, level)
        return self._numbered(number, level)

    def observe(self, problem: Problem, accuracy: float) -> None:
        """Tell the curriculum, if there is one, which part of a drawn problem's responses are right. See `Curriculum.observe`."""
        if self._curriculum is not None:
            self._curriculum.observe(problem.columns[LEVEL], accuracy)

    def metrics(self) -> dict[str, float]:
        """prompts/dropped and prompts/truncated up to here, and those of the curriculum."""
        found = {"prompts/dropped": float(self.dropped), "prompts/truncated": float(self.truncated)}
        return found | (self._curriculum.metrics() if self._curriculum is not None else {})

    def state(self) -> dict[str, Any]:
        """All that the next draws depend on besides the configuration; JSON."""
        return {
            "seed": self._seed,  # the random state: every epoch's order is made of it
            "size": self.size,
            "position": self.position,
            "dropped": self.dropped,
            "truncated": self.truncated,
            "curriculum": None if self._curriculum is None else self._curriculum.state(),
            "source": None if self._streamed is None else self._streamed.stream_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ConfigError: the state is of another seed, of other problems, or of another curriculum.
        """
        for name, here in (("seed", self._seed), ("size", self.size)):
            if state[name] != here:
                raise ConfigError(
                    f"the prompts to resume are of {name} {state[name]}, these of {name} {here}: the order would be another. "
                    "Resume with the seed and the data that the run began with"
                )
        if (state["curriculum"] is None) != (self._curriculum is None):
            had = "no" if state["curriculum"] is None else "a"
            raise ConfigError(f"environment.curriculum: the run to resume had {had} curriculum: keep it so")
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        if self._streamed is not None:
            self._streamed.restore_stream(state["source"])
        self.position, self.dropped, self.truncated = state["position"], state["dropped"], state["truncated"]

    def _next(self) -> tuple[str, Problem]:
        if self._streamed is not None:
            uid, problem = f"s{self.position}", self._streamed.next_train()
        else:
            assert self.size is not None
            epoch, place = divmod(self.position, self.size)
            index = int(epoch_order(self.size, self._seed, epoch)[place])
            level = None if self._curriculum is None else self._curriculum.level
            uid, problem = f"{epoch}.{index}", self._numbered(index, level)
        self.position += 1
        return uid, problem

    def _encoded(self, uid: str, problem: Problem) -> DrawnPrompt | None:
        if self._encoder is None or self._room is None:
            raise RuntimeError("draw_encoded needs an encoder and room")
        held_out = bool(self._held_out) and prompt_digest(problem) in self._held_out
        whole = self._encoder.prompt(problem)
        token_ids = None if held_out else fit(problem, whole, self._room, self._on_too_long)
        if token_ids is None:
            self.dropped += 1
            return None
        self.truncated += len(token_ids) < len(whole)
        return DrawnPrompt(uid, problem, token_ids)

    def _numbered(self, index: int, level: int | None) -> Problem:
        if level is None:
            return self._problems.problem("train", index)
        problem = self._leveled.problem_at(level, "train", index)
        return replace(problem, columns={**problem.columns, LEVEL: level})
