"""Commands of earlier versions of dpsim: each answers with the line to type today."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from dpsim.errors import ConfigError

NEW_LINES = {
    "compare": "dpsim report {all}",
    "lab": "python -m dpsim.lab {all}",
    "trace": "dpsim report {all} --trace",
    "validate": "python -m dpsim.validation {all}",
}
"""By an old command the line in its place: ``all`` are its words, ``files`` the first of them by commas, ``rest`` the
others."""
_NEW_FLAGS: dict[str, dict[str, str]] = {}
"""By an old command the new spelling of its flags; others are passed on as they were typed."""


def check(arguments: Sequence[str], commands: Collection[str]) -> None:
    """Raise ``ConfigError`` with the line to type today if ``arguments`` name an old command, and none of today's."""
    words = 2 if " ".join(arguments[:2]) in NEW_LINES else 1
    old = " ".join(arguments[:words])
    if old in NEW_LINES and arguments[0] not in commands:
        raise ConfigError(
            f"dpsim {old} has another name in this version",
            allowed=", ".join(each for each in commands if not each.startswith("-")),
            remedy=f"type: {_new_line(old, arguments[words:])}",
        )


def _new_line(old: str, arguments: Sequence[str]) -> str:
    """Return the line that does today what an old command did."""
    new_flags = _NEW_FLAGS.get(old, {})
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = []
    for word in arguments[:end]:
        flag, equals, value = word.partition("=")
        own.append(new_flags.get(flag, flag) + equals + value)
    first = next((number for number, word in enumerate(own) if word.startswith("-")), end)
    words = [*own, *arguments[end:]]
    parts = {"all": shlex.join(words), "files": shlex.quote(",".join(own[:first])), "rest": shlex.join(words[first:])}
    return " ".join(NEW_LINES[old].format(**parts).split())
