"""No secret where people read: what a recipe may not hold in plain text, and texts (errors, mostly) without the values of secrets.

recipe ──► no_secret_in_url, no_secret_in_options ──► refused, with how to write it: ${env:NAME}
text   ──► redacted: values that this process has looked up ──► their references; passwords in other URLs ──► ***
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")

_REFER = "would stand in every report: refer to it, ${env:NAME} or ${file:path}"
_HINT = f"{_REFER}, or let the storage client find it itself (its own variables and files)"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\s]*)")
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_MARK = "\0"  # where a reference stands
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
# Of these the name before the @ is a user's, or (Azure) a container's; elsewhere it may be a key.
_WITH_USERS = frozenset({"abfs", "abfss", "wasb", "wasbs", "sftp", "ssh", "ftp", "smb", "hdfs"})
_SECRET_NAME = re.compile(
    r"(?:.*[_.-])?(?:api|access|secret|account|private|auth)[_-]?key|(?:.*[_.-])?(?:password|passwd|secret|credentials?)"
    r"|(?:(?:auth|access|api|bearer|hf|session|refresh)[_-]?)?token|x-amz-(?:signature|credential|security-token)|sig|signature",
    re.IGNORECASE,
)
_PARAMETER = re.compile(r"([?&])([^=&#\s'\"]+)=([^&#\s'\"]+)")
_USERINFO = re.compile(r"(://)([^/@\s'\"]+|[^/@:\s'\"]+:[^@\s'\"]+)@")
_SHORTEST = 4  # characters of a value that is looked for in texts; shorter ones are words

_looked_up: dict[str, str] = {}  # value -> reference


def remember(value: str, reference: str) -> None:
    """From now on `redacted` and `hidden` write the reference in place of the value."""
    if len(value) >= _SHORTEST:
        _looked_up.setdefault(value, reference)


def hidden(text: str) -> str:
    """The text with the references in place of all values that this process has looked up. `resolve` gives the text back."""
    for value in sorted(_looked_up, key=len, reverse=True):
        text = text.replace(value, _looked_up[value])
    return text


def redacted(text: str) -> str:
    """`hidden`, and without whatever else looks like a password in a URL. For messages."""
    text = _USERINFO.sub(lambda match: match[0] if _refers(match[2]) else f"{match[1]}***@", hidden(text))
    return _PARAMETER.sub(lambda match: f"{match[1]}{match[2]}=***" if _is_secret(match[2], match[3]) else match[0], text)


def no_secret_in_url(value: str) -> str:
    """A path or URL (also a chained one, simplecache::https://...) whose user, password and keys are references.

    Raises:
        ValueError: one is written out.
    """
    plain = REFERENCE.sub(_MARK, value)
    for scheme, authority in (match.groups() for part in _CHAIN.split(plain) for match in _URL.finditer(part)):
        userinfo, at, host = authority.rpartition("@")
        user, colon, password = userinfo.partition(":")
        harmless = password.strip(_MARK) == "" != password if colon else user.strip(_MARK) == "" or scheme in _WITH_USERS
        if at and not harmless:
            raise ValueError(f"a URL with a user or password {_HINT}")
        if "@" in plain and not _HOST.fullmatch(host):  # key:sec/ret@bucket: what stands before the slash is no host and port
            raise ValueError(f"a URL with a user or password {_HINT}")
    for _, name, given in _PARAMETER.findall(value):
        if _is_secret(name, given):
            raise ValueError(f"a URL with a key or signature ({name}) {_HINT}")
    return value


def no_secret_in_options(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of a class: those whose name says that they are secret are references, and so are passwords in URLs.

    Raises:
        ValueError: one is written out; names it.
    """
    for name, inner in value.items():
        _check_option(str(name), inner)
    return value


def no_secret_in_override(value: str) -> str:
    """`dotted.field=value`, likewise. Raises: as `no_secret_in_options`."""
    name, _, given = value.partition("=")
    _check_option(name.rpartition(".")[2], given)
    return value


Url = Annotated[str, AfterValidator(no_secret_in_url)]
Options = Annotated[dict[str, Any], AfterValidator(no_secret_in_options)]
Override = Annotated[str, AfterValidator(no_secret_in_override)]


def _check_option(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        no_secret_in_options(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_option(name, inner)
    elif isinstance(value, str):
        if _is_secret(name, value):
            raise ValueError(f"{name}: a secret that is written out {_REFER}")
        if "://" in value:
            no_secret_in_url(value)


def _is_secret(name: str, value: str) -> bool:
    return bool(value) and not _refers(value) and _SECRET_NAME.fullmatch(name) is not None


def _refers(value: str) -> bool:
    """Whether it is made of references alone, as of a user and a password."""
    return not REFERENCE.sub("", value).strip(": ")
