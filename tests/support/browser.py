"""A real browser without a window, in which tests run the JavaScript of pages."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(_NAMES)}")


def run(folder: Path, *arguments: str) -> str:
    """Return what the browser prints, with a profile of its own in a folder."""
    assert BROWSER is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}")
    done = subprocess.run([BROWSER, *flags, *arguments], capture_output=True, text=True, check=True, timeout=600)
    return done.stdout


def evaluated(folder: Path, script: str, body: str = "") -> str:
    """Return the text that a script, the body of a function, returns when a page with a body has loaded, or its error.

    Frames may show files of the folder. The function may ``await``: time passes as fast as the browser computes.
    """
    show = """
    addEventListener("load", async () => {
      let text;
      try { text = await (async function () { %s })(); } catch (error) { text = "failed: " + error.stack; }
      document.body.replaceChildren(Object.assign(document.createElement("pre"), {id: "result", textContent: text}));
    });"""
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><body>{body}<script>{show % script}</script>", encoding="utf-8"
    )
    waits = ("--virtual-time-budget=60000",) if "await " in script else ()
    dumped = run(folder, "--allow-file-access-from-files", *waits, "--dump-dom", page.as_uri())
    found = re.search(r'<pre id="result">(.*?)</pre>', dumped, re.DOTALL)
    assert found, dumped[-2000:]
    return html.unescape(found[1])
