"""Mistakes on the command line as errors of dpsim: what was given, what is allowed, what to do next."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, get_args, get_origin

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from dpsim.errors import ConfigError, unknown

_GONE = {
    "--experiment": "give the file in place of the question: dpsim sweep FILE.toml",
    "--scaling": "leave it out: --local-batch is weak scaling, --global-batch strong scaling",
    "--measure": "type the dpsim sweep that dpsim tune prints last; other plans: dpsim sweep FILE.toml (docs/grid.md)",
    "--source": "leave it out: --trace writes the measured step above the predicted one",
}
"""By a flag of earlier versions what to do today."""


def as_dpsim_error(app: App, error: CycloptsError, arguments: Sequence[str]) -> ConfigError:
    """Return a parsing error of ``arguments`` as a ``ConfigError``."""
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__
    words = list(error.command_chain or ())
    remedy = f"see {' '.join([*app.name, *words])} --help"
    match error:
        case MissingArgumentError(keyword=None) if misspelt := _misspelt_flag(app, words, arguments, remedy):
            return misspelt
        case UnknownCommandError() if error.unused_tokens:
            parent = error.app if error.app is not None else app
            commands = [name for name in parent if not name.startswith("-")]
            return unknown("command", error.unused_tokens[0], commands, remedy=remedy)
        case UnknownOptionError():
            given = error.token.keyword or error.token.value
            return _unknown_flag(given, error.argument_collection, remedy)
        case CoercionError() if error.token is not None and error.argument is not None:
            given = error.token.keyword or error.argument.name
            return ConfigError(f"{given} is {error.token.value!r}", allowed=_allowed(error.target_type), remedy=remedy)
        case MissingArgumentError(keyword="--torch-script"):
            allowed = "the path of a Python script, or a module as python -m takes it"
            remedy = "write it like --torch-script train.py, or --torch-script package.train"
            return ConfigError("--torch-script has no value", allowed=allowed, remedy=remedy)
        case MissingArgumentError() if error.argument is not None:
            given = error.keyword or error.argument.name
            lack = "has no value" if error.keyword else "is missing"
            return ConfigError(f"{given} {lack}", allowed=error.argument.parameter.help or "", remedy=remedy)
        case UnusedCliTokensError():
            excess = " ".join(error.unused_tokens or ())
            return ConfigError(f"{excess!r} is more than this command takes", allowed="flags", remedy=remedy)
    error.verbose = False
    return ConfigError(" ".join(str(error).split()), remedy=remedy)


def _misspelt_flag(app: App, words: Iterable[str], arguments: Sequence[str], remedy: str) -> ConfigError | None:
    """Return the error for the first unknown flag: where a flag is missing, it may be that flag, misspelt."""
    command = app
    for word in words:
        command = command[word]
    collection = command.assemble_argument_collection()
    flags = _flags(collection)
    before_other_words = itertools.takewhile(lambda word: word != "--", arguments)
    for flag in (word.split("=", 1)[0] for word in before_other_words if word.startswith("--")):
        if flag not in flags:
            return _unknown_flag(flag, collection, remedy)
    return None


def _unknown_flag(given: str, arguments: ArgumentCollection, remedy: str) -> ConfigError:
    """Return the error for a flag that is none of these; where a script takes arguments, it may be one of those."""
    flag = given.split("=", 1)[0]
    if flag in _GONE:
        return ConfigError(
            f"{flag} is no flag of this version", allowed=", ".join(_flags(arguments)), remedy=_GONE[flag]
        )
    error = unknown("flag", flag, [*_flags(arguments), "--help"], remedy=remedy)
    if not any("ARGUMENTS" in argument.names for argument in arguments):
        return error
    remedy = f"arguments of the script follow --, as in -- {given}; {error.remedy}"
    return ConfigError(error.given, allowed=error.allowed, remedy=remedy)


def _flags(arguments: ArgumentCollection) -> list[str]:
    return sorted(name for argument in arguments for name in argument.names if name.startswith("--"))


def _allowed(target: object) -> str:
    if get_origin(target) is Literal:
        return ", ".join(str(word) for word in get_args(target))
    words = ((int, "a whole number"), (float, "a number"), (bool, "no value: it is a switch"))
    return next((allowed for kind, allowed in words if target is kind), "")
