"""One request to an OpenAI-compatible chat endpoint: a text, a refusal that may be repeated, or an error. The key is in none of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from actors.environments.rewards.limits import retry_after_s
from configs.base import ConfigError
from configs.redaction import hidden
from configs.rewards import JudgeReward

_BODY_BYTES = 1 << 20
_EXCERPT_CHARACTERS = 200
_CONNECT_S = 10.0
# An endpoint on this machine is asked directly, also where the environment names a proxy for everything.
_DIRECT: dict[str, None] = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))


class JudgeError(RuntimeError):
    """There is no grade, and asking again would not help. The message says why, without the key."""


@dataclass(frozen=True)
class Refused:
    """An attempt that may be repeated.

    Attributes:
        retry_after_s: not before so many seconds; 0: the service did not say.
    """

    why: str
    retry_after_s: float = 0.0


class Endpoint:
    """Connections to one endpoint, through the proxy that the environment names unless it is on this machine. No redirects.

    Args:
        key: sent as a bearer token; None: none is sent.

    Attributes:
        where: the address that is asked, for messages.

    Raises:
        ConfigError: the key cannot be sent, the URL is none, or the environment names a proxy that cannot be used.
    """

    def __init__(self, config: JudgeReward, key: str | None) -> None:
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ConfigError(f"{config.label}: api_key: the value is empty, or has spaces or characters that no header can hold")
        self._key = key
        try:
            base = httpx.URL(config.url)
            self._url = base.copy_with(path=base.path.rstrip("/") + "/chat/completions", fragment=None)
            self._client = httpx.AsyncClient(
                headers={"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"}),
                mounts=_DIRECT,
                # Those who wait have deadlines of their own. This one is for a dead connection while new ones keep asking the same.
                timeout=httpx.Timeout(config.timeout_s, connect=min(_CONNECT_S, config.timeout_s), pool=None),
                limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
                follow_redirects=False,
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:  # ImportError: a SOCKS proxy needs a package
            raise ConfigError(f"{config.label}: the url, or the proxy that the environment names: {self._said(error)}") from None
        if base.userinfo or not base.host:  # httpx would send a user's password in place of the key
            raise ConfigError(f"{config.label}: url: write http://host:port/v1, without user and password; the key goes to api_key")
        self.where = hidden(str(self._url.copy_with(query=None)))

    async def post(self, body: bytes) -> str | Refused:
        """Ask once; returns the text of the reply.

        Raises:
            JudgeError: refused for good, or the reply is no chat completion.
        """
        try:
            content = bytearray()
            async with self._client.stream("POST", self._url, content=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) >= _BODY_BYTES:
                        break
            return self._reply(response, bytes(content[:_BODY_BYTES]))
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.DecodingError) as error:
            said = self._said(error)
        except httpx.TransportError as error:
            return Refused(f"a lost connection ({self._said(error)})")
        raise JudgeError(f"{said}: {self.where}")  # here, not in `except`: httpx's errors hold the request, which holds the key

    async def close(self) -> None:
        await self._client.aclose()

    def _reply(self, response: httpx.Response, content: bytes) -> str | Refused:
        said = f"{response.status_code} {self._hide(response.reason_phrase)}"
        shown = self.shown(content.decode("utf-8", "replace"))
        if response.status_code in (408, 429) or response.status_code >= 500:
            return Refused(f"{said} ({shown})", retry_after_s(response.headers.get("retry-after"), datetime.now(UTC)))
        if not response.is_success:
            hint = ", and redirects are not followed" if response.is_redirect else ""
            raise JudgeError(f"{said}{hint}: {self.where}: {shown}")
        if len(content) == _BODY_BYTES:
            raise JudgeError(f"the reply is larger than {_BODY_BYTES:,} bytes: {self.where}")
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise JudgeError(f"no chat completion with a text came from {self.where}: {shown}")
        return text

    def shown(self, text: str) -> str:
        """The beginning of what the service said, in one line between quotes, without the key."""
        return repr(_excerpt(self._hide(text)))

    def _said(self, error: Exception) -> str:
        return _excerpt(self._hide(f"{type(error).__name__}: {error}"))

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _excerpt(text: str) -> str:
    line = " ".join(text[: 4 * _EXCERPT_CHARACTERS].split())
    return line if len(line) <= _EXCERPT_CHARACTERS else line[:_EXCERPT_CHARACTERS] + "..."
