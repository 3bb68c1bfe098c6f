"""The judge against a stub that speaks real HTTP: what it asks, what it makes of bad services, and that equal questions are asked once."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import pickle
import re
import socket
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from actors.environments.base import Problem
from actors.environments.rewards.base import Response
from actors.environments.rewards.endpoint import JudgeError
from actors.environments.rewards.judge import Judge
from configs.base import ConfigError
from configs.rewards import JudgeReward
from tests.actors.environments.judge_stub import JudgeStub, Reply
from tests.patience import WAIT_S

KEY = "sk-very-secret-0123456789"
PROBLEM = Problem("p0", "What is 6 x 7?", "42")


@pytest.fixture
def stub() -> Iterator[JudgeStub]:
    with JudgeStub() as running:
        yield running


def answer(text: str) -> Response:
    return Response(text, 1, False)


def config(url: str, **fields: Any) -> JudgeReward:
    return JudgeReward(url=url, model="stub", **{"timeout_s": WAIT_S, **fields})


def using[T](config: JudgeReward, work: Callable[[Judge], Coroutine[Any, Any, T]], key: str | None = KEY) -> tuple[T, dict[str, float]]:
    """What `work` returns, and the judge's metrics after it."""

    async def run() -> tuple[T, dict[str, float]]:
        judge = Judge(config, key, first_back_off_s=0.01)
        try:
            return await work(judge), judge.metrics()
        finally:
            await judge.close()

    return asyncio.run(run())


def one(config: JudgeReward, text: str = "42", key: str | None = KEY) -> tuple[float, dict[str, float]]:
    return using(config, lambda judge: judge.grade(PROBLEM, answer(text)), key)


def refused(config: JudgeReward, kind: type[Exception] = JudgeError) -> str:
    """The message of the one error, after a look for the key in all that could be printed of it."""
    with pytest.raises(kind) as caught:
        one(config)
    error: BaseException | None = caught.value
    everything = "".join(traceback.format_exception(caught.value)) + repr(pickle.loads(pickle.dumps(caught.value)))
    while error is not None:
        everything += f"{error} {error!r} {error.args} {vars(error)}"
        error = error.__cause__ or error.__context__
    assert KEY not in everything
    return str(caught.value)


# ---- what is asked ----


def test_the_question_the_key_and_the_grade(stub: JudgeStub) -> None:
    stub.script(Reply("I give it 7.5"))
    grade, metrics = one(config(stub.url, temperature=0.5, max_tokens=9))
    assert grade == 0.75
    assert metrics == {"requests": 1, "retries": 0, "cache_hits": 0, "rate_limit_wait_s": pytest.approx(0, abs=WAIT_S)}
    assert (stub.paths, stub.keys) == (["/v1/chat/completions"], [f"Bearer {KEY}"])
    (body,) = stub.asked
    assert {name: body[name] for name in ("model", "temperature", "max_tokens")} == {"model": "stub", "temperature": 0.5, "max_tokens": 9}
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert message["content"].startswith("Question:\nWhat is 6 x 7?\n\nReference answer:\n42\n\nResponse:\n42\n\n")


def test_without_a_key_none_is_sent_and_a_query_is_kept(stub: JudgeStub) -> None:
    assert one(config(stub.url + "/?version=1"), key=None)[0] == 1.0
    assert (stub.keys, stub.paths) == ([None], ["/v1/chat/completions?version=1"])


# ---- bad services ----


def test_a_refusal_for_the_rate_is_repeated(stub: JudgeStub) -> None:
    stub.script(Reply.status(429, "slow down", retry_after="0.02"), Reply.status(503), Reply("5"))
    grade, metrics = one(config(stub.url))
    assert grade == 0.5
    assert (metrics["requests"], metrics["retries"], len(stub.asked)) == (3, 2, 3)


@pytest.mark.parametrize("how", ["reset", "cut"])
def test_a_lost_connection_is_repeated(stub: JudgeStub, how: Any) -> None:
    stub.script(Reply(how=how), Reply(how=how))
    grade, metrics = one(config(stub.url, retries=2))
    assert (grade, metrics["retries"]) == (1.0, 2)
    stub.usual = Reply(how=how)
    assert "a lost connection" in refused(config(stub.url, retries=1))


def test_a_service_that_stays_broken(stub: JudgeStub) -> None:
    stub.usual = Reply.status(500, f"the key {KEY} broke it")
    message = refused(config(stub.url, retries=2, name="grader"))
    for words in ("grader: 500 Internal Server Error", "the key [key] broke it", "last of 3 attempts", stub.url):
        assert words in message
    assert len(stub.asked) == 3


def test_a_service_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    message = refused(config(url, retries=2))
    assert "a lost connection (ConnectError" in message
    assert "last of 3 attempts" in message


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
def test_a_final_refusal_ends_at_once(stub: JudgeStub, code: int) -> None:
    stub.usual = Reply.status(code, f"{'no ' * 60} {KEY} {'x' * 10_000}")  # the key stands where the excerpt is cut
    message = refused(config(stub.url))
    assert f"judge: {code} " in message
    assert "no no no" in message
    assert len(message) < 500
    assert "sk-" not in message
    assert len(stub.asked) == 1


def test_a_redirect_is_not_followed(stub: JudgeStub) -> None:
    stub.usual = Reply(code=307, headers={"Location": stub.url + "/elsewhere"}, body=b"")
    assert "307 Temporary Redirect, and redirects are not followed" in refused(config(stub.url))
    assert len(stub.asked) == 1


def completion(content: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no chat completion"),
        (b"<html>hello</html>", "<html>hello</html>"),
        (b"\xff\xfe\x00", "no chat completion"),
        (b"[" * 100_000, "no chat completion"),
        (b"9" * 10_000, "no chat completion"),
        (b"null", "no chat completion"),
        (b'{"choices": []}', "no chat completion"),
        (b'{"choices": {"0": 1}}', "no chat completion"),
        (completion(None), "no chat completion"),
        (completion([{"type": "text", "text": "10"}]), "no chat completion"),
        (completion("I cannot say."), "no grade in the reply: 'I cannot say.'"),
        (completion(f"{'a' * 190}{KEY} 11"), "not within 0 and 10"),
        (completion("5" * (1 << 20)), "larger than 1,048,576 bytes"),
    ],
)
def test_garbage(stub: JudgeStub, body: bytes, words: str) -> None:
    stub.usual = Reply(body=body)
    message = refused(config(stub.url))
    assert words in message
    assert len(message) < 500
    assert len(stub.asked) == 1


@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(completion("10"))[:-9] + b"garbage!!"], ids=["plain", "broken"])
def test_a_body_that_cannot_be_decoded(stub: JudgeStub, body: bytes) -> None:
    stub.usual = Reply(body=body, headers={"Content-Encoding": "gzip"})
    assert "DecodingError" in refused(config(stub.url))


@pytest.mark.parametrize(
    ("reply", "fields", "words"),
    [
        (Reply(how="hang"), {}, "the answer of http://127.0.0.1:"),
        (Reply.status(429, "slow down", retry_after="3600"), {}, "a retry, 3.6e+03 s after 429 Too Many Requests"),
        (Reply("?"), {"tokens_per_minute": 1}, "the rate limit"),
    ],
)
def test_a_slow_service_times_out_and_says_where(stub: JudgeStub, reply: Reply, fields: dict[str, Any], words: str) -> None:
    async def ask(judge: Judge) -> str:
        with suppress(JudgeError, TimeoutError):
            await judge.grade(PROBLEM, answer("first"))
        with pytest.raises(TimeoutError, match=r"^judge: no grade within .* s; it last waited for ") as caught:
            await judge.grade(PROBLEM, answer("second"))
        return str(caught.value)

    stub.usual = reply
    for timeout_s in (0.3, 3, 30, WAIT_S):  # a busy machine may not get as far within the first
        message, _ = using(config(stub.url, timeout_s=timeout_s, concurrency=2, **fields), ask)
        if f"within {timeout_s:g} s; it last waited for {words}" in message:
            return
    pytest.fail(message)


def test_a_full_house_is_what_it_waits_for(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> list[Any]:
        return await asyncio.gather(*(judge.grade(PROBLEM, answer(str(n))) for n in range(2)), return_exceptions=True)

    stub.usual = Reply(how="hang")
    (first, second), _ = using(config(stub.url, timeout_s=2.0, concurrency=1), ask)
    assert "the answer of" in str(first)
    assert "a free place" in str(second)


@pytest.mark.parametrize("key", ["", "two words", f"{KEY}\n{KEY}", "ключ"])
def test_a_key_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(ConfigError, match="judge: api_key") as caught:
        Judge(config("http://127.0.0.1:1/v1"), key)
    assert key not in str(caught.value) or not key


@pytest.mark.parametrize("url", ["http:///v1", "http://[::1/v1", "http://127.0.0.1:port/v1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"judge: .*url"):
        Judge(config(url), KEY)


def test_a_url_with_a_password_is_no_setting() -> None:
    with pytest.raises(ValueError, match="as api_key, by reference") as caught:
        config("http://me:hidden@127.0.0.1/v1")
    assert "hidden" not in str(caught.value)


def test_the_key_is_in_no_log_and_no_repr(stub: JudgeStub, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(judge: Judge) -> str:
        await judge.grade(PROBLEM, answer("42"))
        return repr(judge) + repr(vars(judge)["_endpoint"])

    stub.script(Reply.status(500))
    with caplog.at_level(logging.DEBUG):
        shown, _ = using(config(stub.url), ask)
    assert KEY not in shown + caplog.text


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_judge_on_this_machine_is_asked_without_the_proxy(stub: JudgeStub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert one(config(stub.url, retries=0))[0] == 1.0
    assert one(config(stub.url.replace("127.0.0.1", "localhost"), retries=0))[0] == 1.0


def test_a_judge_elsewhere_is_asked_through_the_proxy(stub: JudgeStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", stub.url.removesuffix("/v1"))
    assert one(config("http://judge.invalid/v1", retries=0))[0] == 1.0
    assert stub.paths == ["http://judge.invalid/v1/chat/completions"]


# ---- equal questions ----


def test_an_equal_question_is_asked_once(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> list[float]:
        return [await judge.grade(PROBLEM, answer(text)) for text in ("a", "b", "a", "c", "a", "b")]

    stub.script(Reply("0"), Reply("2"), Reply("3"), Reply("4"))
    grades, metrics = using(config(stub.url, cache_size=2), ask)
    assert grades == [0.0, 0.2, 0.0, 0.3, 0.0, 0.4]  # b was used longest ago when c came
    assert (metrics["requests"], metrics["cache_hits"]) == (4, 2)


def test_without_a_cache_every_question_is_asked(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> list[float]:
        return [await judge.grade(PROBLEM, answer("a")) for _ in range(3)]

    stub.script(Reply("0"), Reply("2"), Reply("3"))
    assert using(config(stub.url, cache_size=0), ask)[0] == [0.0, 0.2, 0.3]


def test_an_error_is_not_kept(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> float:
        with pytest.raises(JudgeError):
            await judge.grade(PROBLEM, answer("a"))
        return await judge.grade(PROBLEM, answer("a"))

    stub.script(Reply("no idea"))
    assert using(config(stub.url), ask)[0] == 1.0


async def under_way(stub: JudgeStub, judge: Judge, count: int) -> list[asyncio.Task[float]]:
    """So many equal questions, of which the one request has arrived."""
    tasks = [asyncio.create_task(judge.grade(PROBLEM, answer("a"))) for _ in range(count)]
    assert await asyncio.to_thread(stub.wait_asked, 1, WAIT_S)
    return tasks


def test_equal_questions_at_once_share_a_request_and_whoever_leaves_takes_nothing_along(stub: JudgeStub) -> None:
    gate = threading.Event()

    async def ask(judge: Judge) -> list[Any]:
        tasks = await under_way(stub, judge, 5)
        for task in tasks[:3]:  # also the one that asked first
            task.cancel()
        await asyncio.wait(tasks[:3])
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    stub.script(Reply("7", gate=gate))
    results, metrics = using(config(stub.url), ask)
    assert [type(result) for result in results[:3]] == [asyncio.CancelledError] * 3
    assert results[3:] == [0.7, 0.7]
    assert (metrics["requests"], metrics["cache_hits"], len(stub.asked)) == (1, 4, 1)


def test_all_who_wait_get_the_error_each_their_own(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> list[Any]:
        return await asyncio.gather(*(judge.grade(PROBLEM, answer("a")) for _ in range(3)), return_exceptions=True)

    stub.script(Reply("no idea"))
    errors, _ = using(config(stub.url), ask)
    assert [type(error) for error in errors] == [JudgeError] * 3
    assert len(set(map(id, errors))) == 3
    assert len(stub.asked) == 1


def test_a_request_that_nobody_waits_for_is_given_up_and_may_be_asked_again(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> float:
        tasks = await under_way(stub, judge, 2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return await judge.grade(PROBLEM, answer("a"))  # with the only place: the first request must have left it

    stub.script(Reply(how="hang"), Reply("6"))
    assert using(config(stub.url, concurrency=1), ask)[0] == 0.6


def test_closing_ends_what_is_under_way(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> list[Any]:
        tasks = await under_way(stub, judge, 2)
        await judge.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(JudgeError, match="closed"):
            await judge.grade(PROBLEM, answer("b"))
        return results

    stub.script(Reply(how="hang"))
    results, _ = using(config(stub.url), ask)
    assert all(isinstance(result, JudgeError) and "closed" in str(result) for result in results)


# ---- requests at once ----


def test_no_more_requests_at_once_than_allowed_and_in_order(stub: JudgeStub) -> None:
    async def ask(judge: Judge) -> list[float]:
        return await asyncio.gather(*(judge.grade(PROBLEM, answer(f"<{n}>")) for n in range(24)))

    stub.usual = Reply("1", delay_s=0.01)
    using(config(stub.url, concurrency=3), ask)
    assert len(stub.asked) == 24
    assert stub.most_at_once <= 3
    stub.asked.clear()
    using(config(stub.url, concurrency=1, requests_per_minute=6000, tokens_per_minute=10_000_000), ask)
    numbers = [int(re.findall(r"<(\d+)>", body["messages"][0]["content"])[0]) for body in stub.asked]
    assert numbers == list(range(24))
