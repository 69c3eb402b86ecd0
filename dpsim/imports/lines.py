"""A benchmark's output as lines: without what launchers put before them, and with errors that name the line."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dpsim.errors import FileFormatError

_LONGEST_LINE = 4096
_TAGGED = re.compile(r"\[[^\]\s]*\d+,\d+\]<std(?:out|err)>:")  # mpirun --tag-output, before each piece of a line
_DAY = r"[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}[T ]|[A-Z][a-z]{2} +[0-9]{1,2} "
_CLOCK = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
_PREFIX = re.compile(
    r"(?:\s*(?:"
    r"[0-9]{1,6}:(?![0-9])"  # srun -l
    rf"|\[?(?:{_DAY})?{_CLOCK}\]?:?"
    r"|[A-Za-z][\w.@/-]*(?:\[[0-9]+\])?(?:\s?[:|]|(?=\s+\|))"  # host: or container |
    r"|\([^()]{1,80}\)|\[[^\[\]]{1,80}\]:?"
    r"|[>|]"
    r")(?=\s|$|#) ?){1,4}"
)
_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
_OF_TABLE = re.compile(r"\s*(?:$|#|[0-9]+\s|Rank\s)")
_ELIDED = re.compile(
    r"(?i)[\W_]*(?:(?:snip|snipped|omitted|truncated|elided|cut|skip|skipped|more|other|lines?|rows?|ranks?|sizes?|output|etc"
    r"|here|of|and|the|so|on|[0-9]+)\b[\W_]*)*"
)
_ELISION = re.compile(r"(?i)\.\s*\.|\u2026|\u22ee|\b(?:snip|snipped|omitted|truncated|elided|cut|skipped)\b")
_OF_NCCL = re.compile(r"\bNCCL [A-Z]+ ")


@dataclass(frozen=True)
class Source:
    """A file as the lines it holds; lines are counted from 1."""

    path: Path
    lines: tuple[str, ...]

    def text(self, line: int) -> str:
        """Return a line without the spaces around it."""
        return self.lines[line - 1].strip()

    def texts(self) -> list[str]:
        """Return the lines without the spaces around them."""
        return [line.strip() for line in self.lines]

    def is_elided(self, line: int) -> bool:
        """Return whether a line says that others were left out: ``...``, ``[snip]``, ``<10 lines omitted>``."""
        return bool(_ELISION.search(self.text(line)) and _ELIDED.fullmatch(self.text(line)))

    def matches(self, pattern: re.Pattern[str], first: int = 1, end: int | None = None) -> dict[int, re.Match[str]]:
        """Return the lines from ``first`` on and before ``end`` that match as a whole, with their matches."""
        end = len(self.lines) + 1 if end is None else end
        return {line: match for line in range(first, end) if (match := pattern.fullmatch(self.text(line)))}

    def refuse(self, where: int | str, given: str, *, allowed: str = "", remedy: str = "") -> FileFormatError:
        """Return the error that names the file and the line (or another part)."""
        part = f"line {where}" if isinstance(where, int) else where
        return FileFormatError(f"{self.path}, {part}: {given}", allowed=allowed, remedy=remedy)


def read_source(path: Path) -> Source:
    """Return the lines of a text file (``-``: of standard input), with or without a byte-order mark, of any system.

    What ``srun -l`` or ``mpirun --tag-output`` put before every line is taken away. Raises ``FileFormatError``.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"cannot read {path}: {error.strerror or error}", allowed="a file that nccl-tests, OSU or IMB printed"
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{path}, line {data[: error.start].count(10) + 1}: byte {data[error.start]:#04x} is no UTF-8 text",
            allowed="the text that the benchmark printed, in UTF-8",
            remedy="save it as UTF-8, or copy it again: it may be damaged",
        ) from error
    source = Source(path, _without_prefixes(_COLOUR.sub("", text).replace("\r\n", "\n").split("\n")))
    for line, content in enumerate(source.lines, 1):
        if len(content) > _LONGEST_LINE and not content.lstrip().startswith("{"):  # JSON may be one line
            raise source.refuse(
                line,
                f"{len(content):,} characters",
                allowed=f"lines of up to {_LONGEST_LINE:,}",
                remedy="give the text that the benchmark printed; this may be cut off or damaged",
            )
    return source


def _without_prefixes(lines: list[str]) -> tuple[str, ...]:
    """Return the lines without the tags of ``mpirun``, and without a prefix that most lines of a table have.

    That is what ``srun -l``, time stamps, names of hosts and quotes put before a line; no row begins so.
    """
    untagged = [_TAGGED.sub("", line) if _TAGGED.match(line) else line for line in lines]
    lines_of_table = [line for line in untagged if line.strip() and not _OF_NCCL.search(line)]
    prefixed = [
        line for line in lines_of_table if (match := _PREFIX.match(line)) and _OF_TABLE.match(line, match.end())
    ]
    if 2 * len(prefixed) > len(lines_of_table) and not lines_of_table[0].lstrip().startswith("{"):
        untagged = [_PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line for line in untagged]
    return tuple(untagged)


def shown(text: str) -> str:
    """Return a text of a file as an error shows it: quoted, on one line, not too long."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
