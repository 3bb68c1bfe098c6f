"""Each reward gives what its documentation says, and refuses by name what it cannot do."""

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.base import Environment, Problem, Split
from actors.environments.rewards.base import Response, Reward
from actors.environments.rewards.build import build_rewards, import_rewards
from actors.environments.rewards.guard import guarded
from configs import rewards as configured
from configs.base import ConfigError

USER = "tests.actors.environments.rewards_of_a_user"
PROBLEM = Problem("p:1", "What?", "yes")


def built(config: configured.AnyReward, max_new_tokens: int = 100) -> Reward:
    return build_rewards([config], max_new_tokens=max_new_tokens, environment=None)[config.label]


def score(config: configured.AnyReward, text: str, answer: str = "yes", **columns: Any) -> float | None:
    return built(config).score(Problem("p:1", "What?", answer, columns=columns), Response(text, 1, False))


# ---- exact ----


@pytest.mark.parametrize(
    ("options", "answer", "text", "value"),
    [
        ({}, "yes", " yes\n", 1), ({}, " yes", "yes", 1), ({}, "yes", "Yes", 0), ({}, "yes", "yes.", 0), ({}, "yes", "", 0),
        ({}, "", "", 0), ({}, " ", " ", 0), ({"ignore_case": True}, "STRASSE", "straße", 1), ({"ignore": ",$"}, "1200", "$1,200", 1),
        ({"ignore": ",$"}, "$1,200", "1200", 1), ({"ignore": "-]^\\"}, "a", "]-^\\a", 1), ({"ignore": "x"}, "x", "x", 0),
        ({"pattern": r"\d+"}, "3", "1, 2, 3", 1), ({"pattern": r"\d+"}, "3", "3, 2, 1", 0), ({"pattern": r"\d+"}, "3", "none", 0),
        ({"pattern": r"#### (.+)"}, "72", "so\n#### 7\n#### 72", 1), ({"pattern": r"#### (.+)"}, "72", "72", 0),
        ({"pattern": r"is (\d+)|none"}, "3", "is 3, none", 0), ({"pattern": r"(?P<a>\d)(?P<b>\d)"}, "1", "12", 1),
        ({"pattern": "x*"}, "yes", "yes", 0),
        ({"ignore_case": True, "pattern": "(?i)ANSWER: (.*)"}, "İ", "answer: İ", 1),
    ],
)  # fmt: skip
def test_exact(options: dict[str, Any], answer: str, text: str, value: float) -> None:
    assert score(configured.ExactReward(**options), text, answer) == value


@given(st.text(), st.text(), st.booleans())
def test_exact_without_options_is_equality_of_stripped_texts(answer: str, text: str, same: bool) -> None:
    text = f" {answer}\n" if same else text
    assert score(configured.ExactReward(), text, answer) == float(bool(answer.strip()) and text.strip() == answer.strip())


def test_exact_says_which_answers_it_cannot_judge() -> None:
    reward = built(configured.ExactReward(ignore="$"))
    for empty in ("", " ", "$ "):
        with pytest.raises(ValueError, match="empty"):
            reward.check(Problem("p", "q", empty))
    reward.check(PROBLEM)


@given(st.text(min_size=1).filter(str.strip))
def test_exact_knows_its_own_references(answer: str) -> None:
    problem = Problem("p", "q", answer)
    reward = built(configured.ExactReward())
    right, wrong = reward.reference(problem), reward.corrupted(problem)
    assert right is not None
    assert reward.score(problem, Response(right, 1, False)) == 1
    assert wrong is None or reward.score(problem, Response(wrong, 1, False)) == 0


def test_exact_has_no_reference_where_the_pattern_wants_words_around_the_answer() -> None:
    assert built(configured.ExactReward(pattern=r"#### (.+)")).reference(PROBLEM) is None
    assert built(configured.ExactReward(pattern=r"\w+")).reference(PROBLEM) == "yes"


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"ignore_case": True}, "Anna"), ({"ignore": ","}, "aa,"), ({"pattern": "[A-D]"}, "A"), ({}, " aa"), ({}, "B"),
        ({"pattern": r"\d+"}, "7"), ({}, ""),
    ],
)  # fmt: skip
def test_no_wrong_answer_is_made_that_exact_calls_right(options: dict[str, Any], answer: str) -> None:
    reward, problem = built(configured.ExactReward(**options)), Problem("p", "q", answer)
    wrong = reward.corrupted(problem)
    assert wrong is None or reward.score(problem, Response(wrong, 1, False)) == 0


# ---- regex ----


@pytest.mark.parametrize(
    ("pattern", "full", "text", "value"),
    [("b", False, "abc", 1), ("b", True, "abc", 0), ("a.c", True, "abc", 1), ("a.c", True, "a\nc", 0), ("(?s)a.c", True, "a\nc", 1),
     ("^$", False, "", 1), ("<think>.*</think>", False, "<think></think> x", 1), ("a", True, "a\n", 0)],
)  # fmt: skip
def test_regex(pattern: str, full: bool, text: str, value: float) -> None:
    assert score(configured.RegexReward(pattern=pattern, full=full), text) == value


# ---- length ----


def soft_overlong_punishment(length: int, longest: int, cache: int) -> Fraction:
    """DAPO, arXiv 2503.14476, equation 13, case by case as printed."""
    if length <= longest - cache:
        return Fraction(0)
    if length <= longest:
        return Fraction((longest - cache) - length, cache)
    return Fraction(-1)


@given(st.integers(1, 40_000), st.data())
def test_length_is_equation_13_of_dapo(longest: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, longest))
    length = data.draw(st.integers(0, 2 * longest) | st.sampled_from([longest, longest + 1, longest - cache, longest - cache + 1]))
    for options, over in (({"cache_tokens": cache}, cache), ({}, max(1, longest // 5))):  # the paper's: 4,096 of 20,480
        for config, most in ((configured.LengthReward(max_tokens=longest, **options), 1), (configured.LengthReward(**options), longest)):
            value = built(config, most).score(PROBLEM, Response("", length, False))
            assert value == pytest.approx(float(soft_overlong_punishment(length, longest, over)), abs=1e-12)


@given(st.integers(0, 300))
def test_length_never_rises_and_stays_within_its_bounds(length: int) -> None:
    reward = built(configured.LengthReward(max_tokens=200, cache_tokens=50))
    first, second = (reward.score(PROBLEM, Response("", tokens, True)) for tokens in (length, length + 1))
    assert first is not None
    assert second is not None
    assert -1 <= second <= first <= 0


def test_length_refuses_to_punish_every_response() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.length\.cache_tokens \(101\).*max_new_tokens \(100\)"):
        built(configured.LengthReward(cache_tokens=101), 100)


# ---- json_schema ----

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"age": 3}', 1), (' \n{"age": 3}\n', 1), ('{"age": "3"}', 0), ("{}", 0), ("", 0), ("age: 3", 0), ('{"age": 3} and so on', 0),
        ('So:\n```json\n{"age": 3}\n```\nDone.', 1), ('```\n{"age": 3}\n```', 1), ('```JSON\r\n{"age": 3}\r\n```', 1),
        ('  ```json\n{"age": 3}\n  ```', 1),
        ('```json\n{}\n```\n```json\n{"age": 3}\n```', 1), ('```json\n{"age": 3}\n```\n```json\n{}\n```', 0),
        ('```python\nx = 1\n```\nthen\n```json\n{"age": 3}\n```', 1), ('```json\n{"age": 3}\n```\nfrom\n```python\nx = 1\n```', 1),
        ('```json\n{"age": 3, "code": "```py x```"}\n```', 1), ('{"age": 3, "code": "```"}', 1), ('```json\n{"age": 3}', 0),
        ('{"age": NaN}', 0), ('{"age": 3, "x": NaN}', 0), ('{"age": 3, "x": -Infinity}', 0), ('{"age": 3, "x": 1e999}', 1),
        ('{"age": 3.0}', 1), ('{"age": 3, "age": "x"}', 0), ('{"age": ' + "9" * 10_000 + "}", 0), ('{"age": 3, "x": "\\ud800"}', 1),
        ('{"age": 3}\x00', 0),
        ("[" * 10**6, 0), ("[" * 900 + "]" * 900, 0), ('{"a":' * 10**5 + "1" + "}" * 10**5, 0), ("\ufeff" + '{"age": 3}', 0),
    ],
)  # fmt: skip
def test_json_schema(text: str, value: float) -> None:
    assert score(configured.JsonSchemaReward(json_schema=PERSON), text) == value


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_every_document_fits_the_empty_schema_bare_or_in_a_fence(document: object) -> None:
    for text in (json.dumps(document), f"Here:\n```json\n{json.dumps(document, indent=1)}\n```\n"):
        assert score(configured.JsonSchemaReward(json_schema={}), text) == 1
        assert score(configured.JsonSchemaReward(json_schema={"not": {}}), text) == 0


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"items": [{"type": "integer"}], "additionalItems": False, "$schema": "http://json-schema.org/draft-07/schema#"}, "[1, 2]", 0),
        ({"prefixItems": [{"type": "integer"}], "items": False}, "[1, 2]", 0),
        ({"prefixItems": [{"type": "integer"}], "items": False}, "[1]", 1),
        ({"prefixItems": [{"type": "string"}], "$schema": "http://json-schema.org/draft-07/schema#"}, "[1]", 1),  # of a later draft
        ({"maximum": 3, "exclusiveMaximum": True, "$schema": "http://json-schema.org/draft-04/schema#"}, "3", 0),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, "1", 1),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, '"1"', 0),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, '{"type": "string"}', 1),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, '{"type": "strong"}', 0),
        ({"$id": "http://a.test/x", "properties": {"a": {"$ref": "y"}}, "$defs": {"y": {"$id": "y", "type": "null"}}}, '{"a": null}', 1),
        ({"const": {"$ref": "http://a.test/data"}}, '{"$ref": "http://a.test/data"}', 1),  # data, not a reference
        ({"properties": {"$ref": {"type": "string"}}}, '{"$ref": "x"}', 1),  # a property of that name
        ({"multipleOf": 0.5}, "1e999", 0), ({"multipleOf": 0.5}, "9" * 4000, 0), ({"multipleOf": 2}, "1e999", 0),
        ({"$ref": "#/own/a", "own": {"a": {"items": {"$ref": "#/own/a"}, "type": "array"}}}, "[[]]", 1),
        ({"$ref": "#"}, "1", 0), ({"items": {"$ref": "#"}}, "[" * 300 + "]" * 300, 0), ({"items": {"$ref": "#"}}, "[[[]]]", 1),
    ],
)  # fmt: skip
def test_json_schema_drafts_and_references(schema: dict[str, Any], text: str, value: float) -> None:
    assert score(configured.JsonSchemaReward(json_schema=schema), text) == value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strnig"}, r"rewards\.form\.json_schema: not a JSON schema: type: 'strnig'"),
        ({"properties": {"a": {"minimum": "1"}}}, r"rewards\.form\.json_schema: not a JSON schema: properties\.a\.minimum"),
        ({"pattern": "("}, r"rewards\.form\.json_schema: not a JSON schema: pattern"),
        ({"$schema": "http://json-schema.org/draft-99/schema#"}, r"rewards\.form\.json_schema\.\$schema: .*draft-99"),
        ({"$ref": "http://a.test/other.json"}, r"rewards\.form\.json_schema: \$ref 'http://a\.test/other\.json' .*not fetched"),
        ({"properties": {"a": {"items": {"$ref": "http://a.test/b"}}}}, r"\$ref 'http://a\.test/b'"),
        ({"allOf": [{"$ref": "file:///etc/passwd"}]}, r"\$ref 'file:///etc/passwd'"),
        ({"$ref": "#/$defs/nothing"}, r"\$ref '.*nothing'"), ({"$dynamicRef": "other.json#x"}, r"\$ref"),
        ({"$schema": 3}, r"rewards\.form\.json_schema\.\$schema: .*3"), ({"$schema": []}, r"json_schema\.\$schema: .*\[\]"),
        ({"$schema": DRAFT_4, "items": {"patternProperties": {"(": {}}}}, r"rewards\.form\.json_schema: patternProperties: '\('"),
        ({"$ref": "#/components/a", "components": {"a": {"items": {"$ref": "http://a.test/b"}}}}, r"\$ref 'http://a\.test/b'"),
        ({"$ref": "#/components/a", "components": {"a": {"type": "strnig"}}}, r"not a JSON schema: type: 'strnig'"),
        ({"$ref": "#/required", "required": ["a"]}, r"rewards\.form\.json_schema: not a JSON schema"),
    ],
)  # fmt: skip
def test_bad_schemas_are_named(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(configured.JsonSchemaReward(name="form", json_schema=schema))


# ---- python ----


def own(name: str, **options: Any) -> configured.PythonReward:
    return configured.PythonReward(import_path=f"{USER}:{name}", name="own", options=options)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("short", "abc", 1.0), ("short", "abcdef", 0.0), ("echo", "said", 1.0), ("later", "x", 0.5),
        ("Weighted", "abc", 3.0), ("WeightedLater", "abc", 3.0),
    ],
)  # fmt: skip
def test_functions_and_classes_sync_and_async(name: str, text: str, value: float) -> None:
    reward = built(own(name))
    assert [reward.score(PROBLEM, Response(text, 1, False)) for _ in range(2)] == [value, value]


def test_a_class_is_made_once_with_its_options() -> None:
    assert score(own("Weighted", weight=2.5), "ab") == 5.0
    with pytest.raises(TypeError, match="wieght"):
        built(own("Weighted", wieght=2.5))


def test_columns_come_by_name() -> None:
    assert score(own("by_name"), "x", level=7, unused="y") == 7.0
    assert score(own("everything"), "x", level=7, other="y", answer="no") == 6.0  # completions, prompts, answer, uid and two more
    assert score(own("Starred"), "x", level=7) == 0.0
    with pytest.raises(TypeError, match="level"):
        score(own("by_name"), "x")


def test_a_chat_comes_as_messages_and_cannot_be_changed() -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"})
    problem = Problem("p:1", "What?", "yes", messages=messages)
    assert built(own("spoil")).score(problem, Response("said", 1, False)) == 1.0
    assert built(own("chat")).score(problem, Response("said", 1, False)) == 1.0


@pytest.mark.parametrize(
    ("what", "value"), [("array", 0.25), ("float32", 0.25), ("int64", 2), ("bool", True), ("tuple", 1.5), ("opinionless", None)]
)
def test_values_of_numpy_are_plain_numbers(what: str, value: float | None) -> None:
    found = score(own("value_of"), what)
    assert found == value
    assert not isinstance(found, np.generic)


@pytest.mark.parametrize("what", ["bare", "nothing", "empty", "two", "text", "bytes", "scalar", "mapping"])
def test_other_returns_are_refused_with_their_type(what: str) -> None:
    with pytest.raises(TypeError, match=r"returned .*one value"):
        score(own("value_of"), what)


def test_a_value_that_is_several_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        score(own("value_of"), "vector")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (f"{USER}:short", {"a": 1}, r"rewards\.own\.options: .*short' is a function"),
        (f"{USER}:CONSTANT", {}, r"rewards\.own\.import_path: .*CONSTANT' is neither"), (f"{USER}:ALIAS", {}, "neither"),
        (f"{USER}:nothing_like_it", {}, r"rewards\.own\.import_path: cannot import .* has no 'nothing_like_it'"),
        ("no_such_module_here:f", {}, r"rewards\.own\.import_path: cannot import .*ModuleNotFoundError"),
        ("os:system", {}, r"os:system' is neither"), ("os:system", {"command": "false"}, "os:system"),
        ("subprocess:Popen", {"args": ["false"]}, r"rewards\.own\.import_path: .*give it a method __call__"),
        ("functools:partial", {}, r"rewards\.own\.import_path: .*give it a method __call__"),
        ("builtins:type", {}, r"rewards\.own\.import_path: .*give it a method __call__"),
    ],
)  # fmt: skip
def test_what_is_no_reward_is_refused_before_it_is_called(path: str, options: dict[str, Any], message: str) -> None:
    config = configured.PythonReward(import_path=path, name="own", options=options)
    for refuse in (lambda: import_rewards([config]), lambda: built(config)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_a_class_whose_objects_cannot_be_called_is_never_made(tmp_path: Path) -> None:
    mark = tmp_path / "made"
    for path, options in ((f"{USER}:Uncallable", {"mark": str(mark)}), ("os:system", {"command": f"touch {mark}"})):
        with pytest.raises(ConfigError, match=r"rewards\.own\.import_path"):
            built(configured.PythonReward(import_path=path, name="own", options=options))
    assert not mark.exists()


def test_a_module_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_of_a_user.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"rewards\.own\.import_path: cannot import .*SystemExit: 3"):
        built(configured.PythonReward(import_path="script_of_a_user:f", name="own"))


# ---- reasoning_gym: what its verifiers evaluate (test_guard.py has more) ----

MARK = "mark_of_a_response"
IN_A_FORMULA = [
    "lambdify((), \"__import__('sys').modules.__setitem__('{m}', 1)\")()", "(Add for Add in (1,)).gi_frame.f_builtins['vars']()",
    "(Add for Add in (1,)).gi_frame.f_builtins['eval']('__import__(\"sys\").modules.__setitem__(\"{m}\", 1)')",
    "(Add for Add in (1,)).gi_frame.f_builtins['__import__']('sys').modules.setdefault('{m}', 1)",
    "sympify(\"lambdify((), \\\"__import__('sys').modules.setdefault('{m}', 1)\\\")()\")", "list(map(lambdify, [()], ['1']))[0]()",
    "(Add for Add in (1,)).throw(GeneratorExit)", "init_session()",
]  # fmt: skip


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"])
def test_a_formula_makes_no_code_and_reaches_no_frame(task: str) -> None:
    from reasoning_gym.factory import DATASETS

    dataset, config = DATASETS[task]
    entry = dataset(config=config(seed=1))[0]
    problem, reward = Problem("t0", entry["question"], str(entry["answer"]), columns=entry), built(configured.ReasoningGymReward())
    for text in (*IN_A_FORMULA, *(f"1 + {formula}" for formula in IN_A_FORMULA)):
        value = reward.score(problem, Response(text.replace("{m}", MARK), 1, False))
        assert value in (0.0, 0.01), text  # 0.05 is countdown's, for a formula that has a value
        assert MARK not in sys.modules, text
    assert reward.score(problem, Response(problem.answer, 1, False)) == 1.0


def test_what_is_no_exception_becomes_one() -> None:
    for error in (GeneratorExit, type("Theirs", (BaseException,), {})):
        with pytest.raises(RuntimeError, match=error.__name__), guarded():
            raise error


# ---- environment ----


class Own(Environment):
    """Pays by the length of a response, in numpy's numbers."""

    def size(self, split: Split) -> int:
        return 1

    def problem(self, split: Split, index: int) -> Problem:
        return PROBLEM

    def score(self, problem: Problem, response: str) -> Any:
        return None if response == "" else np.float32(len(response) / 4)


class Mute(Environment):
    size, problem = Own.size, Own.problem


def test_the_environment_s_own_score() -> None:
    config = configured.EnvironmentReward()
    reward = build_rewards([config], max_new_tokens=1, environment=Own())["environment"]
    assert reward.score(PROBLEM, Response("abc", 1, False)) == 0.75
    assert type(reward.score(PROBLEM, Response("abc", 1, False))) is float
    assert reward.score(PROBLEM, Response("", 1, False)) is None
    assert (reward.reference(PROBLEM), reward.corrupted(PROBLEM)) == ("yes", None)
    with pytest.raises(ConfigError, match="needs an environment with a `score`"):
        build_rewards([config], max_new_tokens=1, environment=Mute())
    with pytest.raises(NotImplementedError, match="Mute has no `score`"):
        Mute().score(PROBLEM, "abc")


# ---- build ----


def test_rewards_are_built_by_label_and_judges_are_left_out() -> None:
    configs: list[configured.AnyReward] = [
        configured.ExactReward(), configured.ExactReward(name="other"), configured.RegexReward(pattern="x"),
        configured.LengthReward(cache_tokens=2), configured.JsonSchemaReward(json_schema={}), configured.ReasoningGymReward(),
        own("short"), configured.JudgeReward(url="http://127.0.0.1:1/v1", model="m"),
    ]  # fmt: skip
    import_rewards(configs)
    made = build_rewards(configs, max_new_tokens=9, environment=None)
    assert list(made) == ["exact", "other", "regex", "length", "json_schema", "reasoning_gym", "own"]


def test_a_kind_that_cannot_be_computed_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.environment: .*`score`"):
        built(configured.EnvironmentReward())
