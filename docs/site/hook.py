"""The site of the documentation: its files, where their links lead, and its navigation (a hook of MkDocs).

A page is named by its path in the repository. The site begins with README.md and docs/ and has every file that its
pages link to: Markdown as a page, Python and TOML as a page that shows them, anything else as it is. A link to a report
or a folder leads to its own page. The navigation is the list of docs/README.md.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_ASSETS = ("iframe-worker.js", "iframe-worker.LICENSE", "site.css")
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[#)])")
_HTML_LINK = re.compile(r'(?:href|src)="([^"#:]+)"')
_QUESTION = re.compile(r"^## (.*)\n((?:(?:- |  ).*\n)+)", re.MULTILINE)
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_CODE_OR_MATH = re.compile(r"`[^`\n]*`|\$+([^$\n]+)\$+")
_BEFORE_LIST = re.compile(r"^(?![-*|#]|\d+\. |    )(.+\n)(?=- |\d+\. |\|)", re.MULTILINE)
_SHOWN = {".py": "python", ".toml": "toml", "": ""}  # and folders
_API = "# Python\n\n`import dpsim` offers these names, each of which is loaded when it is first used.\n"
_OBJECT = "::: {0}\n    options:\n      heading: dpsim.{1}\n      toc_label: {1}\n\n"


def on_config(config: MkDocsConfig) -> None:
    """Take the navigation from the list of docs/README.md."""
    config.nav = [{"Start": "README.md"}, {"All pages": "docs/README.md"}]
    for question, items in _QUESTION.findall(_read("docs/README.md")):
        pages = re.findall(r"\[([^]]+)\]\((\w[\w-]*\.md)\)", items)
        config.nav.append({question: [{title: f"docs/{name}"} for title, name in pages]})
    config.nav[-1]["Reference"].append({"Python": "api.md"})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Replace the files of docs/ by those that are reached from the pages."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for name in _ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(ROOT / "docs" / "site" / name)))
    files.append(File.generated(config, "api.md", content=_api()))
    for name in _reached():
        if _shown(name):
            files.append(File.generated(config, f"{name}.md", content=_page_that_shows(name)))
        elif Path(name).name != "report.md":  # copied as it is, when all pages are built
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn GitHub's Markdown into that of MkDocs: links, and outside of code lists, tables and formulas."""
    name = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        file = _file(name, match[0])
        return os.path.relpath(f"{file}.md" if _shown(file) else file, os.path.dirname(name)) if file else match[0]

    parts = _FENCE.split(_LINK.sub(link, markdown))
    parts[::2] = map(_outside_code, parts[::2])
    return "".join(parts)


def on_nav(nav: Navigation, **_: object) -> None:
    nav.items.append(Link("Reports", "reports/index.html"))


def on_post_build(config: MkDocsConfig) -> None:
    """Copy what MkDocs would take for pages: the reports as Markdown, which their pages link to."""
    for name in _reached():
        if Path(name).name == "report.md":
            shutil.copy(ROOT / name, Path(config.site_dir) / name)


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _api() -> str:
    """Return the page of the names that dpsim offers, by the modules that have them."""
    assigned = [node for node in ast.parse(_read("dpsim/__init__.py")).body if isinstance(node, ast.Assign)]
    lists = {ast.unparse(node.targets[0]): node.value for node in assigned}
    homes, modules = ast.literal_eval(lists["_HOMES"]), ast.literal_eval(lists["_MODULES"])
    names = sorted((name, module) for module, names in homes.items() for name in names)
    groups = {
        "Functions": [(name, f"{module}.{name}") for name, module in names if name.islower()],
        "Classes": [(name, f"{module}.{name}") for name, module in names if not name.islower()],
        "Modules": [(name, f"dpsim.{name}") for name in modules],
    }
    return _API + "".join(
        f"\n## {group}\n\n" + "".join(_OBJECT.format(path, name) for name, path in paths)
        for group, paths in groups.items()
    )


def _reached() -> list[str]:
    """Return the names of README.md, the pages of docs/ and all that they link to, directly or not."""
    names = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
    for name in names:  # grows
        links = {".md": _LINK, ".html": _HTML_LINK}.get(Path(name).suffix)
        if links and Path(name).name != "report.md":
            files = [_file(name, link) for link in links.findall(_read(name))]
            names.extend(dict.fromkeys(file for file in files if file and file not in names))
    return names


def _file(name: str, link: str) -> str | None:
    """Return the file or folder that a link of a file leads to, of a report and a folder its page; None for no file."""
    path = Path(os.path.normpath(os.path.join(os.path.dirname(name), link)))
    pages = [path / "README.md", path / "index.html"] if (ROOT / path).is_dir() else [path]
    if path.name == "report.md" and name.endswith(".md"):
        pages.insert(0, path.with_name("index.html"))
    return next((str(each) for each in [*pages, path] if (ROOT / each).exists()), None)


def _shown(name: str) -> bool:
    return Path(name).suffix in _SHOWN


def _page_that_shows(name: str) -> str:
    """Return a page, which no search finds, that shows a file, or the names in a folder."""
    if (path := ROOT / name).is_dir():
        text = "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()) if each.name[0] not in "._")
    else:
        text = f"````{_SHOWN[path.suffix]}\n{_read(name)}\n````\n"
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{text}"


def _outside_code(text: str) -> str:
    """Return text with lists and tables apart from the line above, items four spaces wide, and formulas as MathML."""
    text = _BEFORE_LIST.sub(r"\1\n", re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE))
    return _CODE_OR_MATH.sub(lambda it: convert(it[1]) if it[1] else it[0], text)
