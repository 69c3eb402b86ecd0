"""Commands of earlier versions of dpsim: each answers with the line to type today."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence

from dpsim.errors import ConfigError

NEW_LINES = {
    "advise": "dpsim predict {all} --rank strategy",
    "compare": "dpsim report {all}",
    "machine": "dpsim calibrate --help",
    "machine compare": "dpsim calibrate --compare {files} {rest}",
    "machine list": "dpsim calibrate --list {rest}",
    "machine merge": "dpsim calibrate --merge {files} {rest}",
    "machine show": "dpsim calibrate --show {files} {rest}",
    "estimate": "dpsim profile {all}",
    "explore": "dpsim predict {rest} {page}",
    "explore STUDY": "dpsim report {files} {rest} {page}",
    "lab": "python -m dpsim.lab {all}",
    "measure": "dpsim sweep {all}",
    "trace": "dpsim report {all} --trace",
    "watch": "dpsim explain {all}",
    "validate": "python -m dpsim.validation {all}",
}
"""By an old command today's line: ``all`` its words, ``files`` the first ones by commas, ``rest`` the others."""
_NEW_FLAGS = {
    "estimate": {
        "--rows": "--from-steps",
        "--row": "--from-steps",
        "--fusion-rule": "--set fusion_rule=",
        "--fusion-threshold": "--set fusion_threshold_bytes=",
        "--algorithm": "--set algorithm=",
        "--overlap": "--set overlap=",
        "--accumulate": "--set accumulate=",
        "--wire-dtype": "--set wire_dtype=",
    },
    "explore": {"--output": "--page"},
    "measure": {"--bucket-cap": "--fusion-threshold", "--communication": "--algorithm"},
}
"""By an old command the new spelling of its flags; others are passed on as they were typed."""


def current(arguments: Sequence[str], commands: Collection[str]) -> Sequence[str]:
    """Return the words of a command line; those of ``watch``, whose job runs, as they are today, and say so.

    Raises ``ConfigError`` with the line to type if they name another old command.
    """
    words = 2 if " ".join(arguments[:2]) in NEW_LINES else 1
    old = " ".join(arguments[:words])
    if old not in NEW_LINES or arguments[0] in commands:
        return arguments
    given, line = f"dpsim {old} has another name in this version", _new_line(old, arguments[words:])
    if old == "watch":
        print(f"dpsim: {given}: {line}", file=sys.stderr)
        return ["explain", *arguments[1:]]
    allowed = ", ".join(each for each in commands if not each.startswith("-"))
    raise ConfigError(given, allowed=allowed, remedy=f"type: {line}")


def _new_line(old: str, arguments: Sequence[str]) -> str:
    """Return the line that does today what an old command did."""
    new_flags = _NEW_FLAGS.get(old, {})
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own: list[str] = []
    for word in arguments[:end]:
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        *before, last = new_flags[flag].split() if flag in new_flags else [flag]
        if own and own[-1].endswith("=") and not equals:  # --set NAME= and the value that follows
            own[-1] += word
        else:
            own += [*before, last + equals * (not last.endswith("=")) + value]
    first = next((number for number, word in enumerate(own) if word.startswith("-")), len(own))
    words = [*own, *arguments[end:]]
    parts = {
        "all": shlex.join(words),
        "files": shlex.quote(",".join(own[:first])),
        "rest": shlex.join(words[first:]),
        "page": "" if "--page" in own else "--page explore.html",
    }
    line = NEW_LINES["explore STUDY" if old == "explore" and first else old]
    return " ".join(filter(None, (part.format(**parts) for part in line.split(" "))))
