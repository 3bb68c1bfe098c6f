"""Secrets are references wherever a configuration is shown, and values only where they are resolved."""

from __future__ import annotations

import os
import string
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError, create_model

from configs import redaction
from configs.base import ConfigError, StrictModel, explain
from configs.rewards import AnyReward, JudgeReward
from configs.secrets import SecretReference, resolve

VALUE = "sk-very-secret-0123456789"
Recipe = create_model("Recipe", __base__=StrictModel, rewards=(tuple[AnyReward, ...], ()))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TEST_JUDGE_KEY", VALUE)
    return "${env:TEST_JUDGE_KEY}"


@pytest.mark.parametrize("text", ["${env:NAME}", "${file:/run/secrets/key}", "${file:~/key}", "${file:a b}"])
def test_references(text: str) -> None:
    assert JudgeReward(url="http://h/v1", model="m", api_key=text).api_key == text


@pytest.mark.parametrize("value", [VALUE, "", "$NAME", "${NAME}", "${env:}", "${vault:x}", "a${env:X}", "${env:X}b", "${env:X}\n", 7, None])
def test_other_values_are_no_references(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(SecretReference).validate_python(value)


def test_a_variable_is_resolved(key: str) -> None:
    assert resolve(key, "api_key") == VALUE
    assert resolve(f"Bearer {key}, {key}", "header") == f"Bearer {VALUE}, {VALUE}"


def test_a_file_is_resolved_without_its_last_line_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"{VALUE}\n")
    assert resolve(f"${{file:{tmp_path}/key}}", "api_key") == VALUE
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("${file:~/key}", "api_key") == VALUE


def test_nested_values_are_copied_with_their_types(key: str) -> None:
    given_value = {"a": key, "b": [key, 1, None, {"c": (key, 2.5)}], "plain": "text", "${env:NAME}": True}
    before = repr(given_value)
    assert resolve(given_value, "options") == {
        "a": VALUE,
        "b": [VALUE, 1, None, {"c": (VALUE, 2.5)}],
        "plain": "text",
        "${env:NAME}": True,
    }
    assert repr(given_value) == before


def test_what_a_secret_holds_is_not_resolved_again(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_OUTER", key)
    assert resolve("${env:TEST_OUTER}", "api_key") == key


PLAIN = st.text().filter(lambda text: "${" not in text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | PLAIN,
        lambda inner: st.lists(inner) | st.dictionaries(PLAIN, inner) | st.tuples(inner, inner),
        max_leaves=10,
    )
)
def test_values_without_references_stay_as_they_are(value: Any) -> None:
    assert resolve(value, "x") == value


def test_a_missing_variable_is_named_with_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_MISSING", raising=False)
    monkeypatch.setenv("TEST_JUDGE_KEY", VALUE)
    options = {"ok": "${env:TEST_JUDGE_KEY}", "headers": [{"x": "a"}, {"key": "${env:TEST_JUDGE_KEY} ${env:TEST_MISSING}"}]}
    with pytest.raises(ConfigError) as caught:
        resolve(options, "rewards[1].options")
    message = str(caught.value)
    assert message.startswith("rewards[1].options.headers[1].key: ")
    assert "TEST_MISSING" in message
    assert "export" in message
    assert VALUE not in message


def test_an_empty_variable_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_EMPTY", "")
    with pytest.raises(ConfigError, match="TEST_EMPTY is not set"):
        resolve("${env:TEST_EMPTY}", "api_key")


@pytest.mark.parametrize("kind", ["none", "folder", "binary"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(VALUE.encode() + b"\xff")
    with pytest.raises(ConfigError) as caught:
        resolve(f"${{file:{path}}}", "rewards.judge.api_key")
    assert str(caught.value).startswith(f"rewards.judge.api_key: the file {path} cannot be read: ")
    assert caught.value.__cause__ is None  # a decoding error holds the bytes
    assert VALUE not in "".join(traceback.format_exception(caught.value))


def test_dumps_and_reprs_keep_the_reference(key: str) -> None:
    reward = JudgeReward(url="http://h/v1", model="m", api_key=key)
    assert resolve(reward.api_key, "api_key") == VALUE
    recipe = Recipe.model_validate({"rewards": [reward, {"kind": "python", "import_path": "a:b", "options": {"token": key}}]})
    for text in (recipe.model_dump_json(), repr(recipe), str(recipe.model_dump()), str(recipe.model_dump(mode="json"))):
        assert text.count(key) == 2
        assert VALUE not in text
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


JUDGE: dict[str, Any] = {"kind": "judge", "url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize(
    "reward",
    [
        {**JUDGE, "api_key": VALUE},
        {**JUDGE, "api_key": f"${{env:{VALUE}"},
        {**JUDGE, "api_key": [VALUE]},
        {**JUDGE, "api_key": {"value": VALUE}},
        {**JUDGE, "api_key": VALUE.encode() + b"\xff"},
        {**JUDGE, "apikey": VALUE},
        {**JUDGE, "api_key": VALUE, "max_tokens": "many"},
        {**JUDGE, "kind": "jugde", "api_key": VALUE},
        {"api_key": VALUE},
        [{**JUDGE, "api_key": VALUE}],
    ],
)
def test_a_literal_key_is_refused_and_not_repeated(reward: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate({"rewards": [reward]})
    assert VALUE not in f"{caught.value} {caught.value!r}"
    message = str(explain(caught.value, Recipe, "recipe 'x'"))
    assert message.startswith("recipe 'x': rewards.0")
    assert VALUE not in message


def test_a_number_for_a_key_is_not_repeated_and_other_values_are() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate({"rewards": [{**JUDGE, "api_key": 123456789, "max_tokens": "many"}]})
    message = str(explain(caught.value, Recipe, "recipe 'x'"))
    assert "123456789" not in message
    assert "(got 'many')" in message


def test_the_message_says_what_to_write() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate({"rewards": [{**JUDGE, "api_key": VALUE}]})
    message = str(explain(caught.value, Recipe, "recipe 'x'"))
    assert "api_key: a secret is given by reference, ${env:NAME} or ${file:path}" in message


def secret_fields(model: type[StrictModel]) -> set[str]:
    return {name for name, info in model.model_fields.items() if "_is_one" in f"{info.annotation!r} {info.metadata!r}"}


def every_model(model: type[StrictModel]) -> set[type[StrictModel]]:
    return {model}.union(*(every_model(child) for child in model.__subclasses__()))


def test_explain_knows_every_field_that_holds_a_secret() -> None:
    """`explain` goes by the field's name; a secret under another name would be repeated."""
    import configs.run  # noqa: F401  (all configuration classes)

    assert secret_fields(JudgeReward) == {"api_key"}
    probe = create_model("Probe", __base__=StrictModel, plain=(SecretReference, ...), maybe=(SecretReference | None, None))
    assert secret_fields(probe) == {"plain", "maybe"}
    for model in every_model(StrictModel) - {probe}:
        assert secret_fields(model) <= {"api_key"}, model


@given(name=st.text(string.ascii_uppercase + "_", min_size=1), value=st.text(string.ascii_letters + string.digits, min_size=1))
def test_any_variable_is_resolved_whole(name: str, value: str) -> None:
    variable = f"TEST_GENERATED_{name}"
    # Neither stays: a value such as "rows" would be taken for a secret in other tests' paths.
    with patch.dict(os.environ, {variable: value}), patch.dict(redaction._looked_up):
        assert resolve(f"<${{env:{variable}}}>", "x") == f"<{value}>"
