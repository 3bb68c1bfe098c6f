"""A headless Chromium, spoken to over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.patience import WAIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class NavigatedError(Exception):
    """The page went away while it was asked."""


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    _session: str | None = None

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:  # events come in between
            answer = json.loads(self._socket.recv(timeout=WAIT_S))
            if answer.get("id") == number:
                if "navigated" in str(answer.get("error", "")):
                    raise NavigatedError
                assert "error" not in answer, answer
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        return self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"].get("value")

    def open(self, url: str, *texts: str) -> str:
        """Go there; wait until the page shows the texts. Returns all that it shows."""
        self._call("Page.navigate", url=url)
        return self.shows(*texts)

    def shows(self, *texts: str) -> str:
        """Wait until the page shows the texts."""
        deadline = time.monotonic() + WAIT_S
        while True:
            shown = ""
            with suppress(NavigatedError):
                shown = str(self.evaluate("document.body ? document.body.innerText : ''"))
            if lacking := [text for text in texts if text not in shown]:
                assert time.monotonic() < deadline, f"{lacking} not in {shown}"
                time.sleep(0.2)
            else:
                return shown

    def click(self, text: str) -> None:
        """On the last tab, button or link of that text."""
        self.shows(text)
        found = f"[...document.querySelectorAll('li,button,a')].filter(e => e.innerText.trim() == {json.dumps(text)})"
        assert self.evaluate(f"{found}.length") > 0, text
        self.evaluate(f"setTimeout(() => {found}.at(-1).click())")  # later: a link's page would be gone before it can answer

    def screenshot(self, path: Path) -> None:
        """As PNG."""
        time.sleep(1.0)  # animations
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser without a window, which ends with the block."""
    assert CHROMIUM is not None
    browser = subprocess.Popen(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--window-size=1280,860", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = profile / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_S
        while not (port.is_file() and port.read_text().count("\n")):
            assert browser.poll() is None
            assert time.monotonic() < deadline, "chromium did not open its DevTools port"
            time.sleep(0.1)
        number, path = port.read_text().split("\n")[:2]
        with connect(f"ws://127.0.0.1:{number}{path}", max_size=None, open_timeout=WAIT_S, ping_interval=None) as socket:
            yield Page(socket)
            with suppress(Exception):
                socket.send(json.dumps({"id": 0, "method": "Browser.close"}))
        browser.wait(20)
    finally:
        if browser.poll() is None:
            browser.kill()
            browser.wait()
