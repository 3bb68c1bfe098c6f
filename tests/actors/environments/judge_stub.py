"""An OpenAI-compatible endpoint on 127.0.0.1 that does what a test tells it, good and bad. Real HTTP, in threads of this process.

with JudgeStub() as stub:
    stub.script(Reply.status(429, "slow down", retry_after="1"), Reply("8"))   # one each, in order; then `stub.usual`
    ... ask stub.url ...
    stub.asked, stub.keys
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Reply:
    """What the stub does with one request.

    Attributes:
        text: of the chat completion. code: status of the response. headers: beside Content-Type and Content-Length.
        body: sent as it is, in place of a chat completion.
        how: "answer"; "reset" the connection; "cut" it off within the body; "hang" until the stub ends.
        delay_s: before that.
        gate: before that, it waits until the gate is open (or the stub ends).
    """

    text: str = "10"
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    how: Literal["answer", "reset", "cut", "hang"] = "answer"
    delay_s: float = 0.0
    gate: threading.Event | None = None

    @classmethod
    def status(cls, code: int, message: str = "", retry_after: str | None = None) -> Reply:
        """A refusal, as OpenAI's servers word it."""
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        return cls(code=code, headers=headers, body=json.dumps({"error": {"message": message}}).encode())

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        message = {"role": "assistant", "content": self.text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return json.dumps({"id": "1", "object": "chat.completion", "model": "stub", "choices": choices}).encode()


class JudgeStub:
    """See the module.

    Attributes:
        usual: what a request gets when the script is over; a function of the request's body, or always the same.
        asked: the bodies of all requests, as they came. keys: their Authorization headers. paths: their paths.
        most_at_once: most requests that were under way together.
    """

    def __init__(self, usual: Reply | Callable[[dict[str, Any]], Reply] | None = None) -> None:
        self.usual = usual or Reply()
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._script: deque[Reply] = deque()
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="judge-stub", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def script(self, *replies: Reply) -> None:
        """Append what the next requests get."""
        with self._changed:
            self._script.extend(replies)

    def wait_asked(self, count: int, timeout_s: float) -> bool:
        """Wait until so many requests have come in all."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.asked) >= count, timeout_s)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, path: str, key: str | None, body: dict[str, Any]) -> Reply:
        with self._changed:
            self.asked.append(body)
            self.keys.append(key)
            self.paths.append(path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._changed.notify_all()
            if self._script:
                return self._script.popleft()
        return self.usual(body) if callable(self.usual) else self.usual

    def _done(self) -> None:
        with self._changed:
            self._at_once -= 1

    def _wait(self, reply: Reply) -> None:
        self._over.wait(None if reply.how == "hang" else reply.delay_s)
        while reply.gate is not None and not reply.gate.wait(0.02) and not self._over.is_set():
            pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # connections that are kept alive end when the client closes them
    request_queue_size = 128


def _handler_of(stub: JudgeStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else the answer's body waits for the client's delayed acknowledgement of its head

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = stub._take(self.path, self.headers["Authorization"], body)
            try:
                stub._wait(reply)
            finally:
                stub._done()  # before the answer: the client may send its next request at once
            with suppress(ConnectionError):  # the client has given up
                self._send(reply)

        def _send(self, reply: Reply) -> None:
            if reply.how in ("reset", "hang"):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return
            content = reply.content()
            self.send_response(reply.code)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if reply.how == "cut" else content)
            self.close_connection |= reply.how == "cut"

        def handle(self) -> None:
            with suppress(ConnectionError, ValueError):  # ValueError: its files after a reset
                super().handle()

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
