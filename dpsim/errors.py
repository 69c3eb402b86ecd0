"""What goes wrong, in three parts: what was given, what is allowed, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DpsimError(ValueError):
    """A mistake that the user can correct. The command line prints its text and exits with code 2.

    ``given`` says what was given (or what happened), ``allowed`` what would have been accepted,
    ``remedy`` what to do next.
    """

    def __init__(self, given: str, *, allowed: str = "", remedy: str = "") -> None:
        self.given, self.allowed, self.remedy = given, allowed, remedy
        lines = [given]
        if allowed:
            lines.append(f"  allowed: {allowed}")
        if remedy:
            lines.append(f"  to do:   {remedy}")
        super().__init__("\n".join(lines))


class ConfigError(DpsimError):
    """A value on the command line, in an experiment or in a call is not allowed."""


class FileFormatError(DpsimError):
    """A file is missing, damaged or not of the kind that is read."""


class CommunicationError(DpsimError):
    """Ranks could not be started, or a rank failed."""


class NotFiniteError(DpsimError):
    """A loss or gradient became NaN or infinite; the text names the step and the layer."""


def unknown(what: str, given: object, allowed: Iterable[str], *, remedy: str = "") -> ConfigError:
    """The error for a word that is not in a fixed list; it suggests a similar word, if there is one."""
    words = list(allowed)
    near = difflib.get_close_matches(str(given), words, n=1)
    hint = f"did you mean {near[0]!r}?" if near else remedy
    return ConfigError(f"unknown {what} {str(given)!r}", allowed=", ".join(words), remedy=hint)
