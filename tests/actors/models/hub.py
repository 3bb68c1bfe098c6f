"""A hub of Hugging Face with one model, on loopback: what `snapshot_download` asks of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO, COMMIT = "maker/tiny", "a" * 40


class Hub:
    """Attributes: url. asked: "METHOD path" of every request."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, []  # type: ignore[var-annotated]
        self.url = ""


@contextmanager
def serving(directory: Path, *extra: str) -> Iterator[Hub]:
    """Serve the directory's files. `extra`: names of files that nobody should fetch."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()} | dict.fromkeys(extra, b"not wanted")
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            api = f"/api/models/{REPO}"
            if path in (f"{api}/revision/main", api):
                self.send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}).encode(), body, {})
            elif path.startswith(f"{api}/tree/"):
                rows = [{"type": "file", "path": name, "size": len(content), "oid": _digest(content)} for name, content in files.items()]
                self.send(json.dumps(rows).encode(), body, {})
            elif path.startswith(f"/{REPO}/resolve/") and (name := path.split("/", 5)[5]) in files:
                self.send(files[name], body, {"ETag": f'"{_digest(files[name])}"', "X-Repo-Commit": COMMIT})
            else:
                self.send(b"{}", body, {"X-Error-Code": "RepoNotFound"}, status=404)

        def send(self, content: bytes, body: bool, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
