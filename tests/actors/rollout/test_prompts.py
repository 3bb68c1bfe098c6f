"""Data order is a seeded permutation per epoch that can be resumed anywhere, and prompts that are too long hurt nobody."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actors.environments import Problem, Split
from actors.environments.dataset.problems import prompt_digest
from actors.models.scratch_model import write_scratch_model
from actors.rollout.prompts import DrawnPrompt, OnTooLong, PromptEncoder, PromptStream, PromptTooLongError, epoch_order, fit
from configs.base import ConfigError
from configs.model import ModelConfig
from tests.actors.environments.parrot import Parrot

SMALL = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=300)
TEXTS = ["What is 12 + 7 = 19", "What is 3 - 45 = -42"]
TEMPLATE = (  # ChatML, with a switch such as Qwen3's and a refusal such as Gemma's
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if thinking is defined and not thinking %}(none){% endif %}{% endif %}"
)


class Digits:
    """Problem i asks with i digits. Each digit is a token of its own, and the chat has two more."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, split: Split) -> int:
        return self._size

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(uid=f"digits:{index}", question="7" * index, answer="", source="digits")


class Endless(Digits):
    """The same, streamed: two digits, five digits, eight digits, ... and again from two."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._next = 2

    def size(self, split: Split) -> int:
        assert split == "validation"
        return self._size

    def next_train(self) -> Problem:
        problem = self.problem("train", self._next % self._size)
        self._next += 3
        return problem

    def stream_state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore_stream(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scratch_model(tmp_path_factory.mktemp("scratch"), SMALL, TEXTS, seed=0)


@pytest.fixture(scope="module")
def encoder(model: Path) -> PromptEncoder:
    return PromptEncoder(str(model), None)


@pytest.fixture(scope="module")
def templated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PromptEncoder]:
    """An encoder whose tokenizer has TEMPLATE, or no chat template."""
    paths = {True: tmp_path_factory.mktemp("chat"), False: tmp_path_factory.mktemp("plain")}
    tokenizer = PromptEncoder(str(model), None).tokenizer
    for chat, path in paths.items():
        tokenizer.chat_template = TEMPLATE if chat else None
        tokenizer.save_pretrained(path)

    def load(system: str | None = None, *, chat: bool = True, **kwargs: Any) -> PromptEncoder:
        return PromptEncoder(str(paths[chat]), system, kwargs)

    return load


def chat(*messages: tuple[str, str]) -> Problem:
    return Problem("file:7", "for reports", "19", messages=tuple({"role": role, "content": content} for role, content in messages))


# ---- the order ----


def uids_of(size: int, seed: int, epochs: int) -> list[str]:
    return [f"{epoch}.{index}" for epoch in range(epochs) for index in epoch_order(size, seed, epoch)]


@given(size=st.integers(1, 40), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_every_epoch_visits_every_problem_once(size: int, seed: int, epochs: int) -> None:
    drawn = [uid for uid, _ in PromptStream(Digits(size), seed).draw(size * epochs)]
    assert drawn == [uid for uid, _ in PromptStream(Digits(size), seed).draw(size * epochs)] == uids_of(size, seed, epochs)
    assert Counter(drawn) == Counter(f"{epoch}.{index}" for epoch in range(epochs) for index in range(size))


def test_the_order_of_a_seed_stays_as_it_was() -> None:
    """A run of a seed must give the same metrics as ever."""
    first = [(0, 2), (0, 4), (0, 3), (0, 0), (0, 1), (1, 1), (1, 4)]
    stream = PromptStream(Digits(5), 0)
    assert [(uid, problem.uid) for uid, problem in stream.draw(7)] == [(f"{epoch}.{index}", f"digits:{index}") for epoch, index in first]


def test_uids_stay_unique_over_epochs() -> None:
    stream = PromptStream(Parrot(words=["a", "b", "c"]), seed=0)
    uids = [uid for uid, _ in stream.draw(10)]
    assert len(set(uids)) == 10
    assert stream.position == 10


# ---- the tokens ----


def test_scratch_tokenizer_frames_and_round_trips(encoder: PromptEncoder) -> None:
    problem = Problem(uid="0", question="What is 12 + 7 = ", answer="19")
    prompt, answer = encoder.prompt(problem), encoder.answer(problem)
    tokens = encoder.tokenizer.convert_ids_to_tokens(prompt)
    assert (tokens[0], tokens[-1]) == ("<|user|>", "<|assistant|>")
    assert answer[-1] == encoder.tokenizer.eos_token_id
    assert encoder.text(answer) == "19"
    assert len(answer) == 3  # each digit is a token of its own
    assert encoder.text(prompt) == problem.question


@given(text=st.text(max_size=30))
def test_any_text_round_trips_through_the_scratch_tokenizer(encoder: PromptEncoder, text: str) -> None:
    assume(not any(token in text for token in encoder.tokenizer.get_added_vocab()))  # which are left out
    assert encoder.text(encoder.tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_a_text_question_has_the_tokens_that_it_had(templated: Callable[..., PromptEncoder], system: str | None) -> None:
    """Worked out as it was before there were chats."""
    problem = Problem("0", "What is 3 - 45 = ", "-42")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": problem.question})
    for encoder in (templated(system), templated(system, chat=False)):
        tokenizer = encoder.tokenizer
        if tokenizer.chat_template is None:
            expected = tokenizer.encode("\n".join(message["content"] for message in messages) + "\n")
        else:
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encoder.prompt(problem) == expected


@pytest.mark.parametrize(
    ("system", "problem", "text"),
    [
        (None, chat(("user", "3?")), "[user]3?[assistant]"),
        ("Be brief.", chat(("user", "3?")), "[system]Be brief.[user]3?[assistant]"),
        ("Be brief.", chat(("system", "Sing."), ("user", "3?")), "[system]Sing.[user]3?[assistant]"),
        ("S", chat(("user", "a"), ("assistant", "b"), ("user", "c")), "[system]S[user]a[assistant]b[user]c[assistant]"),
    ],
)
def test_chat_messages_go_in_as_they_are(templated: Callable[..., PromptEncoder], system: str | None, problem: Problem, text: str) -> None:
    encoder = templated(system)
    before = json.dumps(problem.messages)
    assert encoder.text(encoder.prompt(problem)) == text
    assert encoder.text(encoder.prompt(problem)) == text
    assert json.dumps(problem.messages) == before


def test_without_a_chat_template_the_contents_are_joined(templated: Callable[..., PromptEncoder]) -> None:
    plain = templated("S", chat=False)
    assert plain.text(plain.prompt(chat(("user", "a"), ("assistant", "b"), ("user", "c")))) == "S\na\nb\nc\n"


def test_chat_template_kwargs_reach_the_template(templated: Callable[..., PromptEncoder]) -> None:
    quick = templated(thinking=False)
    assert quick.text(quick.prompt(Problem("0", "3?", ""))) == "[user]3?[assistant](none)"
    for taken in ("tokenize", "add_generation_prompt", "return_dict", "truncation"):
        with pytest.raises(ConfigError, match=f"environment.chat_template_kwargs: '{taken}' cannot be set"):
            templated(**{taken: True})
    with pytest.raises(ConfigError, match="has no chat template"):
        templated(chat=False, thinking=False)


def test_messages_that_the_tokenizer_does_not_take_are_named(templated: Callable[..., PromptEncoder]) -> None:
    with pytest.raises(ConfigError, match=r"prompt file:7: .*\(user, tool\): no tools here"):
        templated().prompt(chat(("user", "3?"), ("tool", "4")))
    for encoder in (templated(), templated(chat=False)):
        with pytest.raises(ConfigError, match="prompt 5 of web: the model's tokenizer"):
            encoder.prompt(Problem("5", "\ud800", "", source="web"))  # half of a pair: legal in JSON, no UTF-8


# ---- too long ----


@given(ids=st.lists(st.integers(0, 299), max_size=20), room=st.integers(1, 25))
def test_left_truncation_keeps_the_last_tokens(ids: list[int], room: int) -> None:
    kept = fit(Problem("0", "", ""), ids, room, "truncate")
    assert kept is not None
    assert len(kept) == min(len(ids), room)
    assert ids[len(ids) - len(kept) :] == kept


def test_what_becomes_of_a_long_prompt() -> None:
    problem = Problem("data.jsonl:600", "a long story", "", source="web")
    for on_too_long in ("refuse", "drop", "truncate"):
        assert fit(problem, [1, 2, 3], 3, on_too_long) == [1, 2, 3]
    assert fit(problem, [1, 2, 3], 2, "truncate") == [2, 3]
    assert fit(problem, [1, 2, 3], 2, "drop") is None
    with pytest.raises(PromptTooLongError) as raised:
        fit(problem, [1, 2, 3], 2, "refuse")
    for said in ("data.jsonl:600 of web", "3 tokens", "room for 2", "max_new_tokens", "environment.on_too_long", "a long story"):
        assert said in str(raised.value)


@given(size=st.integers(1, 12), room=st.integers(2, 14), seed=st.integers(0, 99), epochs=st.integers(1, 3))
def test_dropped_and_truncated_prompts_are_counted(encoder: PromptEncoder, size: int, room: int, seed: int, epochs: int) -> None:
    """Problem i has i + 2 tokens, so room - 1 of them fit."""
    order = uids_of(size, seed, epochs)
    short = [uid for uid in order if int(uid.split(".")[1]) + 2 <= room]
    dropping = PromptStream(Digits(size), seed, encoder=encoder, room=room, on_too_long="drop")
    assert [drawn.uid for drawn in dropping.draw_encoded(len(short))] == short
    assert dropping.dropped == order.index(short[-1]) + 1 - len(short)
    cutting = PromptStream(Digits(size), seed, encoder=encoder, room=room, on_too_long="truncate")
    drawn = cutting.draw_encoded(len(order))
    assert [prompt.uid for prompt in drawn] == order
    assert [prompt.token_ids for prompt in drawn] == [encoder.prompt(prompt.problem)[-room:] for prompt in drawn]
    assert cutting.metrics() == {"prompts/dropped": 0.0, "prompts/truncated": float(len(order) - len(short))}


def test_an_epoch_without_a_usable_prompt_is_an_error(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptTooLongError, match="none of the last 6 prompts has at most 1 tokens"):
        PromptStream(Digits(3), 0, encoder=encoder, room=1, on_too_long="drop").draw_encoded(1)
    # one usable prompt of many is found however far apart two epochs place it
    stream = PromptStream(Digits(9), 0, encoder=encoder, room=2, on_too_long="drop")
    assert {drawn.problem.uid for drawn in stream.draw_encoded(20)} == {"digits:0"}
    assert len({drawn.uid for drawn in stream.draw_encoded(20)}) == 20


def test_a_refused_prompt_is_named_at_the_draw(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptTooLongError, match=r"digits:\d of digits has \d tokens"):
        PromptStream(Digits(5), 0, encoder=encoder, room=3).draw_encoded(5)
    with pytest.raises(RuntimeError, match="needs an encoder"):
        PromptStream(Digits(5), 0).draw_encoded(1)


# ---- the state ----


def drawn_as(stream: PromptStream, encoded: bool, count: int) -> list[Any]:
    return list(stream.draw_encoded(count)) if encoded else list(stream.draw(count))


@given(
    source=st.sampled_from([Digits, Endless]),
    size=st.integers(3, 12),
    seed=st.integers(0, 99),
    room=st.integers(4, 14),
    on_too_long=st.sampled_from(["drop", "truncate"]),
    before=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=3),
    after=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=3),
)
def test_a_restored_stream_draws_the_tail(
    encoder: PromptEncoder,
    source: type[Digits],
    size: int,
    seed: int,
    room: int,
    on_too_long: OnTooLong,
    before: list[tuple[bool, int]],
    after: list[tuple[bool, int]],
) -> None:
    def new() -> PromptStream:
        return PromptStream(source(size), seed, encoder=encoder, room=room, on_too_long=on_too_long)

    whole, resumed = new(), new()
    uids = [found.uid if isinstance(found, DrawnPrompt) else found[0] for step in before for found in drawn_as(whole, *step)]
    resumed.draw(2)  # what it did before does not matter
    resumed.restore(json.loads(json.dumps(whole.state())))
    for step in after:
        tail = drawn_as(whole, *step)
        assert drawn_as(resumed, *step) == tail
        uids += [found.uid if isinstance(found, DrawnPrompt) else found[0] for found in tail]
    assert resumed.state() == whole.state()
    assert resumed.metrics() == whole.metrics()
    assert len(set(uids)) == len(uids)


def test_a_streamed_source_is_drawn_in_its_own_order() -> None:
    stream = PromptStream(Endless(9), seed=5)
    assert [(uid, len(problem.question)) for uid, problem in stream.draw(4)] == [("s0", 2), ("s1", 5), ("s2", 8), ("s3", 2)]
    assert stream.size is None
    assert stream.state()["source"] == {"next": 14}


def test_a_streamed_source_of_long_prompts_alone_ends(encoder: PromptEncoder) -> None:
    stream = PromptStream(Endless(9), 0, encoder=encoder, room=2, on_too_long="drop")
    stream.patience = 50  # of 20,000
    with pytest.raises(PromptTooLongError, match="none of the last 50 prompts"):
        stream.draw_encoded(1)


def test_a_state_of_another_run_is_refused() -> None:
    state = PromptStream(Digits(5), 3).state()
    with pytest.raises(ConfigError, match="are of seed 3, these of seed 4"):
        PromptStream(Digits(5), 4).restore(state)
    with pytest.raises(ConfigError, match="are of size 5, these of size 6"):
        PromptStream(Digits(6), 3).restore(state)
    with pytest.raises(ConfigError, match="are of size 5, these of size None"):
        PromptStream(Endless(5), 3).restore(state)


# ---- the scratch model ----


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_scratch_model(tmp_path / name, SMALL, TEXTS, seed)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a/model.safetensors").read_bytes() != (tmp_path / "c/model.safetensors").read_bytes()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 100 is below 260"):
        write_scratch_model(tmp_path, SMALL.model_copy(update={"vocab_size": 100}), TEXTS, 0)


def test_prompts_of_further_validation_sets_are_not_drawn(encoder: PromptEncoder) -> None:
    problems = [Problem(str(i), f"question {i}", "a") for i in range(6)]

    class Six:
        def size(self, split: Split) -> int:
            return 6

        def problem(self, split: Split, index: int) -> Problem:
            return problems[index]

    held_out = {prompt_digest(problems[index]) for index in (1, 4)}
    stream = PromptStream(Six(), 0, encoder=encoder, room=1000, held_out=held_out)
    assert sorted(drawn.problem.uid for drawn in stream.draw_encoded(4)) == ["0", "2", "3", "5"]
    stream.draw_encoded(4)
    assert stream.dropped == 4
