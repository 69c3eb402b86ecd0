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


def evaluated(folder: Path, script: str) -> str:
    """Return the text that a script, the body of a function, returns in a page of its own; errors are returned too."""
    page = folder / "page.html"
    run_and_show = """
    let text;
    try { text = (function () { %s })(); } catch (error) { text = "failed: " + error.stack; }
    const shown = document.createElement("pre");
    shown.id = "result";
    shown.textContent = text;
    document.body.append(shown);"""
    body = f"<!doctype html><meta charset=utf-8><body><script>{run_and_show % script}</script>"
    page.write_text(body, encoding="utf-8")
    dumped = run(folder, "--dump-dom", page.as_uri())
    found = re.search(r'<pre id="result">(.*?)</pre>', dumped, re.DOTALL)
    assert found, dumped[-2000:]
    return html.unescape(found[1])
