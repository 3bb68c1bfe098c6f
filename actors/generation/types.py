"""What goes into an engine, what comes out, and how it fails. Plain and picklable; imports neither vLLM nor torch.

GenerationRequest ──► Engine ──► GenerationResult
     one prompt, one response; weight versions ride on the result
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.generation.versions import Segments
from actors.waiting import ActorGoneError
from configs.staleness import AsyncConfig

FinishReason = Literal["stop", "length"]
EngineState = Literal["new", "ready", "failed", "stopped"]
UpdateMode = Literal["in_flight", "wait"]  # between two steps of running requests, or after they have finished


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt for one response.

    Attributes:
        request_id: unique among the client's running requests; comes back on the result.
        prompt_token_ids: at least one id, all below the model's vocab_size.
        max_new_tokens: most response tokens, the eos token included.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; vLLM: SamplingParams.top_p.
        seed: of this response alone, so that a response does not depend on its neighbours' random numbers.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """One response.

    Attributes:
        token_ids: response tokens; ends with an eos token if finish_reason is "stop".
        logprobs: natural log-probability of each token under the distribution that it was drawn from: after temperature and,
            below 1, after top_p (renormalised). A greedy token's is that of temperature 1.
        finish_reason: "stop": an eos token; "length": max_new_tokens, or the end of the context.
        weight_segments: (weight version, number of tokens) in the order of the tokens; a new segment where an update in flight came
            between two of them. The counts add up to the number of tokens.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_segments: Segments

    @property
    def weight_versions(self) -> list[int]:
        """The version that sampled each token: as long as `token_ids`."""
        return [version for version, count in self.weight_segments for _ in range(count)]

    @property
    def weight_version_start(self) -> int:
        """The version that sampled the first token."""
        return self.weight_segments[0][0]


@dataclass(frozen=True)
class UpdateOptions:
    """How new weights reach engines that may be generating.

    Attributes:
        mode: "in_flight": between two steps; running requests go on under the new weights. "wait": running requests end first,
            and what is submitted meanwhile starts under the new weights.
        recompute_kv_cache: in flight, True: running requests' keys and values are computed again under the new weights, prompt and
            response so far; False: they keep those of the old weights (those that vLLM preempts for want of room do not). Either
            way later requests never meet cached prompts of old weights.
        recover: go on without an engine that is dead, as long as one lives.
    """

    mode: UpdateMode = "wait"
    recompute_kv_cache: bool = True
    recover: bool = False

    @classmethod
    def of_async(cls, rules: AsyncConfig) -> UpdateOptions:
        """In an asynchronous run."""
        mode: UpdateMode = "in_flight" if rules.in_flight_weight_updates else "wait"
        return cls(mode, rules.recompute_kv_cache_after_weight_updates, recover=True)


@dataclass(frozen=True)
class WeightUpdate:
    """What an update of the weights took.

    Attributes:
        bytes: size of the tensors.
        pause_s: seconds between two steps of running requests; 0 if none ran. Recomputing their KV cache is part of the next step.
    """

    bytes: int
    pause_s: float


@dataclass(frozen=True)
class EngineHealth:
    """What an engine says of itself.

    Attributes:
        weight_version: of the last update; 0 before any. failure: empty unless the state is "failed".
        updating: what an update of the weights is doing; empty when there is none.
        stale: Ray has started this process in place of one that died, and no update of the weights has succeeded in it yet.
        incarnation: of the engine's process: another one has another.
    """

    state: EngineState
    weight_version: int
    running_requests: int
    failure: str = ""
    updating: str = ""
    stale: bool = False
    incarnation: str = ""


class RequestError(ValueError):
    """A request that no engine can serve; nothing was generated. The message names the request and what is wrong with it."""


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for one response token in max_model_len."""


class GenerationTimeoutError(TimeoutError):
    """The responses were not complete at the deadline. The requests were aborted; the engine can go on."""


class EngineFailedError(RuntimeError):
    """The engine raised inside vLLM and its state is unknown: every later call fails with the same reason."""


class EngineNotReadyError(RuntimeError):
    """The engine has not started, or has been started again: it is without the caller's requests, and without the run's weights."""


class EngineDiedError(ActorGoneError):
    """An engine actor is dead, silent or failed.

    Attributes:
        engine: its name.
        request_ids: of the caller's requests that it had not finished; another engine can take them.
    """

    def __init__(self, engine: str, message: str, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(engine, message, request_ids)
        self.engine, self.request_ids, self._message = engine, request_ids, message

    def __str__(self) -> str:
        return self._message


class NoEngineError(EngineDiedError):
    """Every engine is dead. The message lists them with their reasons; `request_ids` are of the submitted requests that end with this."""
