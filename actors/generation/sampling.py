"""Requests to vLLM's parameters, vLLM's outputs to results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from actors.generation.types import FinishReason, GenerationRequest, GenerationResult, PromptTooLongError, RequestError
from actors.generation.versions import Segments


def sampling_params(request: GenerationRequest, eos_token_ids: Sequence[int]) -> SamplingParams:
    """One response, token ids only, with the log-probability of each sampled token."""
    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=list(eos_token_ids),
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,  # lists of numbers, not an object for each token of each response
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def check_requests(requests: Sequence[GenerationRequest], max_model_len: int, vocab_size: int) -> None:
    """Refuse what vLLM would refuse late, or not at all (it does not check ids when it has no tokenizer).

    Raises:
        RequestError: an id twice, an empty prompt, or a token id outside the vocabulary. PromptTooLongError.
    """
    seen: set[str] = set()
    for request in requests:
        who, prompt = f"request {request.request_id!r}", request.prompt_token_ids
        if request.request_id in seen:
            raise RequestError(f"{who} occurs twice")
        seen.add(request.request_id)
        if not prompt:
            raise RequestError(f"{who}: the prompt is empty")
        if len(prompt) >= max_model_len:
            raise PromptTooLongError(f"{who}: a prompt of {len(prompt)} tokens leaves no room in max_model_len = {max_model_len}")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise RequestError(f"{who}: token id {wrong} is outside the model's vocabulary of {vocab_size}")
        if request.max_new_tokens < 1:
            raise RequestError(f"{who}: max_new_tokens is {request.max_new_tokens}, at least 1 is needed")


def result(output: RequestOutput, request_id: str, segments: Segments) -> GenerationResult:
    """A finished output as a result under the caller's `request_id`.

    Raises:
        RuntimeError: vLLM ended the request for another reason than eos or length, or `segments` do not cover its tokens.
    """
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    flat = cast(FlatLogprobs | None, completion.logprobs)
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    if completion.finish_reason not in reasons or flat is None:
        raise RuntimeError(f"request {request_id!r} ended as {completion.finish_reason!r}")
    if sum(count for _, count in segments) != len(token_ids):
        raise RuntimeError(f"request {request_id!r} has {len(token_ids)} tokens, but weight versions {segments}")
    return GenerationResult(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=[flat.logprobs[start] for start in flat.start_indices],  # the sampled token comes first at each position
        finish_reason=reasons[completion.finish_reason],
        weight_segments=segments,
    )
