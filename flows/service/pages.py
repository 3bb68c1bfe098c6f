"""Reports of runs over HTTP: the Prefect UI links to them, and browsers open no `file://` link from a page of a server.

    run      writes runs/NAME/report.html, and a link PAGES/<flow run id> to runs/NAME      (tasks/publish.py)
    server   GET /<flow run id> ──► PAGES/<flow run id>/report.html as it stands; nothing else

Where Prefect's server asks for a password, this one asks for the same.

python -m flows.service.pages --directory PAGES --address 127.0.0.1:4201
"""

from __future__ import annotations

import argparse
import base64
import hmac
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from configs import settings

_PLACE = re.compile(r"/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


class _Reports(BaseHTTPRequestHandler):
    """GET of one run's report."""

    server: _Server

    def do_GET(self) -> None:
        """The report, 401 without the password, or 404."""
        if not self._may_read():
            self._answer(HTTPStatus.UNAUTHORIZED, b"", **{"WWW-Authenticate": 'Basic realm="grpo-flows"'})
            return
        place = _PLACE.fullmatch(self.path)
        try:
            page = (self.server.directory / place[1] / "report.html").read_bytes() if place else None
        except OSError:
            page = None
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, b"no such run, or it has not written its report yet\n", **{"Content-Type": "text/plain"})
        else:
            self._answer(HTTPStatus.OK, page, **{"Content-Type": "text/html; charset=utf-8"})

    def _may_read(self) -> bool:
        password = settings.get("PREFECT_SERVER_API_AUTH_STRING")
        if password is None:
            return True
        wanted = f"Basic {base64.b64encode(password.encode()).decode()}"
        return hmac.compare_digest(wanted.encode(), self.headers.get("Authorization", "").encode())

    def _answer(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Cache-Control": "no-store"}.items():
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a page that reloads would fill the log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], directory: Path) -> None:
        self.directory = directory
        super().__init__(address, _Reports)


@contextmanager
def reports_server() -> Iterator[None]:
    """On loopback inside the block, for runs of this process and its children, which find it in the environment."""
    with tempfile.TemporaryDirectory(prefix="pages-") as directory, _Server(("127.0.0.1", 0), Path(directory)) as server:
        thread = threading.Thread(target=server.serve_forever, name="reports", daemon=True)
        thread.start()
        try:
            with settings.variables(**environment(Path(directory), f"127.0.0.1:{server.server_port}")):
                yield
        finally:
            server.shutdown()
            thread.join()


def environment(directory: Path, address: str) -> dict[str, str]:
    """Variables of the runs whose reports are served there."""
    return {settings.PAGES: str(directory), settings.PAGES_URL: f"http://{address}"}


def command(directory: Path, address: str) -> list[str]:
    """The command that serves at host:port until it is stopped."""
    return [sys.executable, "-m", "flows.service.pages", "--directory", str(directory), "--address", address]


def main() -> int:
    """Serve until SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m flows.service.pages", description="Serve the reports of runs.")
    parser.add_argument("--directory", type=Path, required=True, help="where runs link to their directories")
    parser.add_argument("--address", required=True, help="host:port")
    options = parser.parse_args()
    host, _, port = options.address.rpartition(":")
    options.directory.mkdir(parents=True, exist_ok=True)
    with _Server((host, int(port)), options.directory) as server:
        print(f"serving at http://{options.address}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
