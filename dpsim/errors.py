"""What goes wrong, in three parts: what was given, what is allowed, what to do next."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

_LONGEST_TEXT = 1000
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Return the text with control characters, surrogates and marks that turn the direction of writing escaped.

    A terminal would obey some of them, and others make a name look like another. Line ends and tabs stay.
    """
    return "".join(
        letter.encode("unicode_escape").decode()
        if letter not in "\n\t" and (unicodedata.category(letter) in ("Cc", "Cs") or letter in _BIDIRECTIONAL)
        else letter
        for letter in text
    )


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
        super().__init__(printable("\n".join(lines)))


class ConfigError(DpsimError):
    """A value on the command line, in an experiment or in a call is not allowed."""


class FileFormatError(DpsimError):
    """A file is missing, damaged or not of the kind that is read."""


class FormatVersionError(FileFormatError):
    """A file is of the right kind, in the format of another version of dpsim."""


class CommunicationError(DpsimError):
    """Ranks could not be started, or a rank failed."""


class AllreduceError(CommunicationError):
    """An algorithm gave a wrong sum, or messages that do not fit."""

    def of_bucket(self, bucket: int) -> AllreduceError:
        """Return the same, with the bucket that was reduced if it is known, and not -1."""
        given = self.given if bucket < 0 else f"bucket {bucket}: {self.given}"
        return AllreduceError(given, allowed=self.allowed, remedy=self.remedy)


class NotFiniteError(DpsimError):
    """A loss or gradient became NaN or infinite; the text names the step and the layer."""


def unknown(what: str, given: object, allowed: Iterable[str], *, remedy: str = "") -> ConfigError:
    """Return the error for a word that is not in a fixed list; it suggests a similar word, if there is one."""
    words = list(allowed)
    near = difflib.get_close_matches(str(given), words, n=1)
    hint = f"did you mean {near[0]!r}?" if near else remedy
    return ConfigError(f"unknown {what} {str(given)!r}", allowed=", ".join(words), remedy=hint)


def text_of(error: BaseException) -> str:
    """Return what an exception says, on a single line of at most 1000 characters that a terminal shows as they are."""
    try:
        said = str(error)
    except Exception:  # the user's own __str__
        said = ""
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(said.split()))
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def is_missing(module: str, error: ModuleNotFoundError) -> bool:
    """Return whether what was not found is ``module`` or a package around it, and nothing that it imports."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")
