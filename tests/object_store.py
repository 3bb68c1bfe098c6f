"""An S3 of this process, on loopback: moto behind a server that can be told to be a bad one.

s3fs ──HTTP──► fault(request) ──► moto
                 ├─ leaves a header out, waits, or refuses before moto sees the request
                 └─ loses or shortens the answer after moto did what was asked
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

Environ = dict[str, Any]
App = Callable[[Environ, Any], Iterable[bytes]]
Fault = Callable[[App], App]


class ObjectStore:
    """Buckets, and what the server does wrong at present.

    Attributes:
        requests: method and path of each since the start.
    """

    def __init__(self) -> None:
        self._moto: App = DomainDispatcherApplication(create_backend_app)
        self._app = self._moto
        self.requests: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=MotoRequestHandler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def _serve(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        return self._app(environ, start_response)

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """The server answers as `fault(moto)` does."""
        self._app = fault(self._moto)
        try:
            yield
        finally:
            self._app = self._moto

    def bucket(self) -> str:
        """A new one; its s3:// URL."""
        url = f"s3://b-{uuid.uuid4().hex}"
        s3fs.S3FileSystem().mkdir(url)
        return url

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Nobody listens where the server was."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            s3fs.S3FileSystem.clear_instance_cache()
            yield
        s3fs.S3FileSystem.clear_instance_cache()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    """One server for the module, found as a user's would be: by the environment."""
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": store.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # botocore's; s3fs repeats by itself
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield store
    s3fs.S3FileSystem.clear_instance_cache()
    store.close()


def without(header: str) -> Fault:
    """A store that does not know this header."""
    name = f"HTTP_{header.upper().replace('-', '_')}"

    def make(app: App) -> App:
        return lambda environ, start: app({key: value for key, value in environ.items() if key != name}, start)

    return make


def slow(seconds: float) -> Fault:
    """A store that takes its time for every request."""

    def make(app: App) -> App:
        def serve(environ: Environ, start: Any) -> Iterable[bytes]:
            time.sleep(seconds)
            return app(environ, start)

        return serve

    return make


def answers_lost(method: str, times: int) -> Fault:
    """A store that does what is asked, but whose first answers to this method get lost."""
    left = [times]

    def make(app: App) -> App:
        def serve(environ: Environ, start: Any) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] != method or left[0] <= 0:
                return app(environ, start)
            left[0] -= 1
            list(app(environ, lambda *_: None))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []

        return serve

    return make


def busy(times: int) -> Fault:
    """A store that has no time for the first requests."""
    left = [times]
    refusal = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"

    def make(app: App) -> App:
        def serve(environ: Environ, start: Any) -> Iterable[bytes]:
            if left[0] <= 0:
                return app(environ, start)
            left[0] -= 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(refusal)))])
            return [refusal]

        return serve

    return make


def cut_short(name: str) -> Fault:
    """A store whose answers with the content of this file end in the middle."""

    def make(app: App) -> App:
        def serve(environ: Environ, start: Any) -> Iterable[bytes]:
            answer = app(environ, start)
            if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith(name):
                return answer
            whole = b"".join(answer)
            return half(whole, environ["werkzeug.socket"])

        return serve

    def half(whole: bytes, connection: socket.socket) -> Iterator[bytes]:
        yield whole[: len(whole) // 2]
        connection.shutdown(socket.SHUT_RDWR)

    return make
