"""Commands and flags of earlier versions of dpsim: each answers with the line to type today."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App

from dpsim.cli import flags
from dpsim.errors import ConfigError

NEW_LINES = {
    "advise": "dpsim predict {all} --rank strategy",
    "compare": "dpsim report {all}",
    "machine": "dpsim calibrate --help",
    "machine list": "dpsim calibrate --list {rest}",
    **{f"machine {verb}": f"dpsim calibrate --{verb} {{files}} {{rest}}" for verb in ("compare", "merge", "show")},
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
NEW_FLAGS: dict[str, dict[str, str]] = {
    "bench": {"--peer-env": "--peers"},
    "estimate": {"--rows": "--from-steps", "--row": "--from-steps"},
    "explore": {"--output": "--page"},
    "measure": {"--bucket-cap": "--fusion-threshold", "--communication": "--algorithm"},
    "predict": {
        "--synchronisation-loss": "--assume compute_slowdown=",
        "--fixed-share": "--assume fixed_share=",
        "--contention": "--assume contention=",
        "--collective-overhead": "--assume collective_overhead_s=",
        "--all": "--rank plan",
        "--efficiency": "--target efficiency=",
        "--speedup": "--target speedup=",
        "--step-time": "--target step-time=",
        "--reproducible": "--set leaves=8",
    },
    "train": {"--nesterov": "--set nesterov=yes"},
    "sweep": {"--reproducible": "--set leaves=8", "--torch-module": "--torch-script"},
    **{name: {"--torch-module": "--torch-script"} for name in ("explain", "profile", "reproduce", "tune")},
}
"""By a command, old or of today, the new spelling of its flags that are gone; others are passed on as they were typed.

Fields that a command takes by ``--set`` alone had flags of their own."""


def current(arguments: Sequence[str], app: App) -> Sequence[str]:
    """Return the words of a command line; those of ``watch``, whose job runs, as they are today, and say so.

    Raises ``ConfigError`` with the line to type if they name another old command, or flags that are gone.
    """
    if not arguments:
        return arguments
    words = 2 if " ".join(arguments[:2]) in NEW_LINES else 1
    name, rest = " ".join(arguments[:words]), list(arguments[words:])
    command, new = _renamed(name, rest, app)
    if name in NEW_LINES and arguments[0] not in app:
        given, line = f"dpsim {name} has another name in this version", _new_line(name, new)
        if name == "watch":
            print(f"dpsim: {given}: {line}", file=sys.stderr)
            return ["explain", *rest]
        allowed = ", ".join(each for each in app if not each.startswith("-"))
    elif new == rest:
        return arguments
    else:
        gone = [word.partition("=")[0] for word in rest if word not in new and word.startswith("--")]
        given = f"{', '.join(gone)} of dpsim {name} has another spelling in this version"
        by_set = ", ".join(flags.by_set(command))
        allowed = f"{flags.SET} NAME=VALUE of {by_set}" if by_set else f"the flags that dpsim {name} --help shows"
        line = f"dpsim {name} {shlex.join(new)}"
    raise ConfigError(given, allowed=allowed, remedy=f"type: {line}")


def _renamed(name: str, arguments: Sequence[str], app: App) -> tuple[Callable[..., Any] | None, list[str]]:
    """Return the command that answers today, and the words that follow its name, their flags in today's spelling."""
    first = NEW_LINES[name].split()[1] if name in NEW_LINES else name
    command = app[first].default_command if first in app and not first.startswith("-") else None
    of_fields = {flags.flag_of(field): f"{flags.SET} {field}=" for field in flags.by_set(command)}
    spelled = of_fields | NEW_FLAGS.get(first, {}) | NEW_FLAGS.get(name, {})
    end = arguments.index(flags.DELIMITER) if flags.DELIMITER in arguments else len(arguments)
    new: list[str] = []
    for word in arguments[:end]:
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        *before, last = spelled[flag].split() if flag in spelled else [flag]
        if new and new[-1].endswith("=") and not equals:  # --set NAME= and the value that follows
            new[-1] += word
        else:
            new += [*before, last + equals * (not last.endswith("=")) + value]
    return command, [*new, *arguments[end:]]


def _new_line(old: str, words: Sequence[str]) -> str:
    """Return the line that does today what an old command did with these words."""
    first = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    parts = {"all": shlex.join(words), "files": shlex.quote(",".join(words[:first])), "rest": shlex.join(words[first:])}
    page = "" if "--page" in words else "--page explore.html"
    line = NEW_LINES["explore STUDY" if old == "explore" and first else old]
    return " ".join(filter(None, (part.format(page=page, **parts) for part in line.split(" "))))
