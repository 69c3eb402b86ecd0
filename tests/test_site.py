"""The site of the documentation, built as ``make docs`` builds it: no dead link, and a search without a network."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import needs_browser, opened

ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.exists(), reason="needs MkDocs, which make docs installs"),
]
_LINK = re.compile(r'<(?!/)(\w+)\b[^>]*?\s(?:href|src)="([^"]+)"')
_FIRST_RESULT = """new Promise((done) => {
  setTimeout(() => done("nothing was found in a minute"), 60000);
  const look = () => {
    const link = document.querySelector(".md-search-result__item a");
    link ? done(link.href) : setTimeout(look, 50);
  };
  look();
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [MKDOCS, "build", "--quiet", "--site-dir", folder]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def _links(page: Path) -> Iterator[tuple[str, str]]:
    for element, link in _LINK.findall(page.read_text(encoding="utf-8")):
        yield element, unquote(link.replace("&amp;", "&"))


def test_every_link_leads_to_a_file_of_the_site_and_no_part_of_a_page_comes_from_outside(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert {site / "index.html", site / "api.html", site / "reports" / "index.html"} < set(pages)
    dead = []
    for page in pages:
        for element, link in _links(page):
            address, _, anchor = link.partition("#")
            target = page if not address else page.parent / address
            if re.match(r"https?:|data:|mailto:", link):
                assert element == "a" or link.startswith("data:"), (page, link)
            elif not target.is_file() or (anchor and target.suffix == ".html" and not _has(target, anchor)):
                dead.append((str(page.relative_to(site)), link))
    assert dead == []


def _has(page: Path, anchor: str) -> bool:
    return re.search(rf'(?:id|name)="{re.escape(anchor)}"', page.read_text(encoding="utf-8")) is not None


@needs_browser
@pytest.mark.parametrize(("word", "page"), [("gossip", "docs/strategies.html"), ("read_workload", "api.html")])
def test_a_word_is_found_in_a_browser_without_a_network(site: Path, tmp_path: Path, word: str, page: str) -> None:
    with opened(tmp_path) as browser:
        browser.send("Network.enable")
        browser.open((site / "index.html").as_uri())
        browser.value("document.querySelector('[data-md-component=search-query]').focus()")
        browser.send("Input.insertText", text=word)
        address = browser.value(_FIRST_RESULT)
        browser.open(address)
        assert address.startswith((site / page).as_uri())
        assert word in browser.value("document.querySelector('article').textContent")
        asked = [
            each["params"]["request"]["url"] for each in browser.events if each["method"] == "Network.requestWillBeSent"
        ]
    assert any(re.search(r"/search/search_index\.js", url) for url in asked)
    assert [url for url in asked if not re.match(r"file:|data:|about:", url)] == []
