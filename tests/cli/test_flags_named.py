"""Every flag that the documentation, a help text or a message names is a flag of some command."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

from dpsim.cli import app, old_names
from dpsim.validation import __main__ as validation

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w=-])")
OTHERS = frozenset(
    [
        "--allow-run-as-root",
        "--preserve-credentials",
        "--send",
        "--batch-size",
        "--bfloat16",
        "--bind-to",
        "--by",
        "--compute-dtype",
        "--defer",
        "--extra-index-url",
        "--force-reinstall",
        "--help",
        "--help-all",
        "--host",
        "--in-16-bits",
        "--install-completion",
        "--layers",
        "--library",
        "--lr",
        "--no-deps",
        "--nproc-per-node",
        "--oversubscribe",
        "--parsable",
        "--pid",
        "--quick",
        "--dpsim-update",
        "--quiet",
        "--report-api-errors",
        "--requeue",
        "--study",
        "--tag-output",
        "--target",
        "--tool",
        "--upgrade",
        "--version",
        "--width",
    ]
)
"""Flags of other programs (mpiexec, pip, pytest, git, Slurm, compute-sanitizer, the experiments, a user's own script),
and of every command."""


def _known() -> set[str]:
    application, names = app.build(), set(OTHERS)
    commands = [validation.build(), *(application[name] for name in application if not name.startswith("-"))]
    for command in commands:
        commands.extend(command[name] for name in command if not name.startswith("-"))
        if command.default_command is not None:
            names |= {name for argument in command.assemble_argument_collection() for name in argument.names}
    return names


def _named(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix == ".py":
        constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        text = "\n".join(value for value in constants if isinstance(value, str))
    return set(FLAG.findall(text))


def test_every_flag_that_is_named_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "dpsim").rglob("*.py")]
    known = _known()
    unknown = {(str(path.relative_to(ROOT)), flag) for path in pages for flag in _named(path) - known}
    others = ("dpsim/experiments", "dpsim/kernels", "dpsim/cli/old_names.py", "dpsim/cli/mistakes.py")
    assert not {each for each in unknown if not each[0].startswith(others)}
    assert "--fusion-threshold" in known and "--wire-dtype" not in known


def test_every_line_of_the_pages_is_in_todays_spelling() -> None:
    application, lines = app.build(), 0
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```sh\n(.*?)```|`(dpsim [^`\n]*)`", path.read_text(), re.DOTALL):
            for line in "".join(block).replace("\\\n", " ").splitlines():
                if line.startswith("dpsim ") and not re.search(r"[<>|;&]|\$\(", line):
                    words = shlex.split(line, comments=True)[1:]
                    assert old_names.current(words, application) == words, (path.name, line)
                    lines += 1
    assert lines > 100
