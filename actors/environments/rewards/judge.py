"""The `judge` reward: a grade by a model behind an OpenAI-compatible endpoint.

    grade ──► cache ──► an equal question under way? wait with it ──► a free place ──► rate limits ──► POST ──► grade
                                                                                          ▲              │
                                                                                          └─ back-off ◄──┘ 429, 5xx, lost connection

One process of a run has the judge and its key, so the limits hold for the whole run. A question keeps its place while it waits for a retry:
when the service refuses, no more than `concurrency` questions are refused, and the others wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
from collections import OrderedDict
from dataclasses import dataclass, field

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.rewards.endpoint import Endpoint, JudgeError
from actors.environments.rewards.limits import RateLimits, back_off_s
from configs.rewards import JudgeReward

_RESPONSE_CHARACTERS = 100_000  # the last ones of a response are shown to the judge: answers stand at the end
_REPLY_CHARACTERS = 10_000  # the last ones of its reply are searched for the grade
_BYTES_PER_TOKEN = 4  # of English text; nothing here knows the judge's tokenizer


@dataclass(eq=False)
class _Question:
    """A question under way, for all who wait for its grade.

    Attributes:
        waiting: how many do. waits_for: what it waits for itself at present, for messages.
    """

    prompt: str
    waiting: int = 0
    waits_for: str = "a free place among the requests (concurrency)"
    task: asyncio.Task[float] = field(init=False)


def fill(template: str, problem: Problem, response: Response) -> str:
    """The prompt: `{question}`, `{answer}` and `{response}` (its last 100,000 characters) are filled in, all at once; other braces stay."""
    values = {"question": problem.question, "answer": problem.answer, "response": response.text[-_RESPONSE_CHARACTERS:]}
    prompt = re.sub(r"\{(question|answer|response)\}", lambda match: values[match[1]], template)
    return prompt.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be sent


def grade_of(reply: str, pattern: re.Pattern[str], scale: float) -> float:
    """The grade in a judge's reply, in [0, 1]: the pattern's last match (its first group, if it has one), divided by `scale`.

    Raises:
        ValueError: there is none, or it is outside.
    """
    matches = list(pattern.finditer(reply[-_REPLY_CHARACTERS:]))
    if not matches:
        raise ValueError("the pattern finds no grade in the reply")
    text = matches[-1][1] if pattern.groups else matches[-1][0]
    try:
        grade = float(text) / scale
    except (TypeError, ValueError):
        raise ValueError("what the pattern finds in the reply is no number") from None
    if not 0 <= grade <= 1:  # nor is NaN
        raise ValueError(f"the grade in the reply is not within 0 and {scale:g}")
    return grade


class Judge:
    """Used from one asyncio event loop. Build it anywhere; await `close()` in that loop.

    Args:
        key: the value of `config.api_key`; None: the endpoint wants none. It stands in no message.
        first_back_off_s: wait before the first retry; it doubles each time.

    Raises:
        ConfigError: the key cannot be sent, the URL is none, or the environment names a proxy that cannot be used.
    """

    def __init__(self, config: JudgeReward, key: str | None, *, first_back_off_s: float = 0.5) -> None:
        self._config, self._first_back_off_s = config, first_back_off_s
        self._endpoint = Endpoint(config, key)
        self._pattern = re.compile(config.pattern)
        self._places = asyncio.Semaphore(config.concurrency)
        self._limits = RateLimits(config.requests_per_minute, config.tokens_per_minute)
        self._cache: OrderedDict[bytes, float] = OrderedDict()  # by the prompt's hash: prompts are long
        self._questions: dict[bytes, _Question] = {}
        self._random = random.Random()
        self._counts = dict.fromkeys(("requests", "retries", "cache_hits"), 0.0)
        self._closed = False

    async def grade(self, problem: Problem, response: Response) -> float:
        """The judge's grade of a response, in [0, 1].

        Raises:
            TimeoutError: none within `timeout_s`; says what it waited for last.
            JudgeError: refused, down after all retries, or a reply without a grade.
        """
        if self._closed:
            raise JudgeError(f"{self._config.label}: the judge is closed")
        prompt = fill(self._config.prompt, problem, response)
        digest = hashlib.sha256(prompt.encode()).digest()
        if (known := self._cache.get(digest)) is not None:
            self._cache.move_to_end(digest)
            self._counts["cache_hits"] += 1
            return known
        question = self._questions.get(digest)
        if question is None:
            question = self._questions[digest] = _Question(prompt)
            question.task = asyncio.create_task(self._answer(digest, question))
            # Else asyncio reports an error that nobody waited for any more.
            question.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            self._counts["cache_hits"] += 1
        question.waiting += 1
        try:
            # Each who waits has a deadline of their own; the request goes on while anyone waits.
            await asyncio.wait({question.task}, timeout=self._config.timeout_s)
        finally:
            question.waiting -= 1
            if not question.waiting and not question.task.done():
                self._forget(digest, question)
                question.task.cancel()
        return self._outcome(question)

    async def close(self) -> None:
        """End what is under way; who waits for it gets a `JudgeError`."""
        self._closed = True
        tasks = [question.task for question in self._questions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._endpoint.close()

    def metrics(self) -> dict[str, float]:
        """Totals: requests (retries among them), retries, cache_hits (an equal question under way is one), rate_limit_wait_s (of all)."""
        return self._counts | {"rate_limit_wait_s": self._limits.waited_s}

    def _outcome(self, question: _Question) -> float:
        label, task = self._config.label, question.task
        if not task.done():
            raise TimeoutError(f"{label}: no grade within {self._config.timeout_s:g} s; it last waited for {question.waits_for}")
        if task.cancelled():
            raise JudgeError(f"{label}: the judge was closed")
        error = task.exception()
        if isinstance(error, JudgeError):
            raise JudgeError(f"{label}: {error}")  # one for each who waits
        return task.result()

    async def _answer(self, digest: bytes, question: _Question) -> float:
        try:
            async with self._places:
                reply = await self._ask(question)
            try:
                grade = grade_of(reply, self._pattern, self._config.scale)
            except ValueError as error:
                raise JudgeError(f"{error}: {self._endpoint.shown(reply)}") from None
            self._cache[digest] = grade
            if len(self._cache) > self._config.cache_size:
                self._cache.popitem(last=False)
            return grade
        finally:
            self._forget(digest, question)

    def _forget(self, digest: bytes, question: _Question) -> None:
        if self._questions.get(digest) is question:
            del self._questions[digest]

    async def _ask(self, question: _Question) -> str:
        """The judge's reply, after as many attempts as it takes."""
        values = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        tokens = math.ceil(len(question.prompt.encode()) / _BYTES_PER_TOKEN) + self._config.max_tokens
        attempt = 0
        while True:
            question.waits_for = "the rate limit (requests_per_minute, tokens_per_minute)"
            await self._limits.take(tokens)
            question.waits_for = f"the answer of {self._endpoint.where}"
            self._counts["requests"] += 1
            answer = await self._endpoint.post(json.dumps(values).encode())
            if isinstance(answer, str):
                return answer
            if attempt == self._config.retries:
                raise JudgeError(f"{answer.why} from {self._endpoint.where}, the last of {attempt + 1} attempts")
            wait = max(answer.retry_after_s, back_off_s(attempt, self._first_back_off_s, self._random.random()))
            question.waits_for = f"a retry, {wait:.3g} s after {answer.why}"
            await asyncio.sleep(wait)
            attempt += 1
            self._counts["retries"] += 1
