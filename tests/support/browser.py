"""A real browser without a window, in which tests run the JavaScript of pages."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu")
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(_NAMES)}")


def run(folder: Path, *arguments: str) -> str:
    """Return what the browser prints, with a profile of its own in a folder."""
    assert BROWSER is not None
    flags = (*_FLAGS, f"--user-data-dir={folder / 'profile'}")
    done = subprocess.run([BROWSER, *flags, *arguments], capture_output=True, text=True, check=True, timeout=600)
    return done.stdout


def evaluated(folder: Path, script: str, body: str = "") -> str:
    """Return the text that a script, the body of a function, returns when a page with a body has loaded, or its error.

    Frames may show files of the folder.
    """
    show = """
    addEventListener("load", () => {
      let text;
      try { text = (function () { %s })(); } catch (error) { text = "failed: " + error.stack; }
      document.body.replaceChildren(Object.assign(document.createElement("pre"), {id: "result", textContent: text}));
    });"""
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><body>{body}<script>{show % script}</script>", encoding="utf-8"
    )
    dumped = run(folder, "--allow-file-access-from-files", "--dump-dom", page.as_uri())
    found = re.search(r'<pre id="result">(.*?)</pre>', dumped, re.DOTALL)
    assert found, dumped[-2000:]
    return html.unescape(found[1])


class Page:
    """A page in a browser, driven as DevTools drives it: real keys, and light or dark as its system would ask for."""

    def __init__(self, to: IO[bytes], back: IO[bytes]) -> None:
        self._to, self._back, self._count, self._session = to, back, 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method of the DevTools protocol; ``events`` has those that came before it."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, address: str) -> None:
        """Open an address, and wait until it has loaded."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.value("document.readyState === 'complete' ? 0 : new Promise((done) => addEventListener('load', done))")

    def value(self, expression: str) -> Any:
        """Return what an expression is worth in the page; for a promise, when it is kept."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and release a key with its Windows key code."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def scheme(self, name: str) -> None:
        """Make the system's colours ``light`` or ``dark``."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def _next(self) -> bytes:
        """Read up to the end of a message."""
        message = bytearray()
        while (byte := self._back.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """Yield an empty page of a browser of its own, whose profile lies in a folder; it ends with the block."""
    assert BROWSER is not None
    (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
    flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    joined = f'exec "$0" "$@" 3<&{read_there} 4>&{write_there}'  # the numbers on which a browser listens and answers
    with subprocess.Popen(
        ["bash", "-c", joined, BROWSER, *flags],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as browser:
        os.close(read_there)
        os.close(write_there)
        try:
            with open(write_here, "wb") as to, open(read_here, "rb") as back:
                yield Page(to, back)
        finally:
            browser.kill()
