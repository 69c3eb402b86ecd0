"""``Field``: all that is said of a field of a configuration, declared once, on the field itself.

``devices: Annotated[int, Decides.SHARES | Decides.STEP_TIME, "Number of devices.", "Numbers of devices: 1,2,4."]``
declares a field: what it decides, the help of its flag, and the help where that takes a list. Which
fields make another training, which need a profile or a calibration of their own, what a resumed run may change, and
the flags of the command line with their help (``dpsim.cli.flags``) are derived: nobody lists fields by hand, so that a
new one belongs to all of these as soon as it is declared. A field without a flag declares what it decides alone.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from dpsim.errors import ConfigError, unknown


class Decides(enum.Flag):
    """What the value of a field has an effect on."""

    NOTHING = 0
    """Where and when something is kept, or which of two equal runs it is."""
    BITS = enum.auto()
    """The numbers that are trained: with another value it is another training."""
    SHARES = enum.auto()
    """Which samples are computed together: local statistics, and the order of sums without leaves."""
    ORDER = enum.auto()
    """The order in which sums over devices are added: the last bits, without leaves."""
    COMPUTE_TIME = enum.auto()
    """The time that a local batch computes: it needs a profile of its own."""
    NETWORK_TIME = enum.auto()
    """The time of a collective: it needs a calibration of its own."""
    STEP_TIME = enum.auto()
    """When operations run and how large they are: priced from the same profile and calibration."""
    PROBLEM = enum.auto()
    """What is to be trained and on what, rather than how: its values are not compared where anything else varies."""


MORE_WORDS = object()


@dataclass(frozen=True)
class Field:
    """A declaration: what the field decides, and the help of its flag, with one value and with ``several``.

    ``kind`` is the field's type. The flag of a field of ``Literal`` type refuses other words by itself, unless
    ``MORE_WORDS`` says that commands take some besides the values.
    """

    decides: Decides
    text: str = ""
    several: str = ""
    more_words: bool = False
    kind: Any = None


@functools.cache
def fields(kind: type[msgspec.Struct], *others: type[msgspec.Struct]) -> dict[str, Field]:
    """Return the declaration of each field of a struct; of one that declares nothing, that of ``others``.

    Raises ``TypeError`` for a field that nobody declares.
    """
    fallback = {name: field for other in others for name, field in fields(other).items()}
    plain, declarations = get_type_hints(kind), dict[str, Field]()
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in kind.__struct_fields__:
            continue
        said = getattr(hint, "__metadata__", ())
        decides = [each for each in said if isinstance(each, Decides)]
        if not decides and name not in fallback:
            raise TypeError(f"{kind.__name__}.{name} does not declare what it decides (dpsim.fields.Decides)")
        text, several, *_ = [*(each for each in said if isinstance(each, str)), "", ""]
        own = decides and Field(decides[0], text, several, MORE_WORDS in said, plain[name])
        declarations[name] = own or fallback[name]
    return declarations


def declared(kind: type[msgspec.Struct], *others: type[msgspec.Struct]) -> dict[str, Decides]:
    """Return what each field of a struct decides; see ``fields``."""
    return {name: field.decides for name, field in fields(kind, *others).items()}


def deciding(what: Decides, kind: type[msgspec.Struct], *others: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of the fields that decide any of ``what``, in the order of the struct."""
    return tuple(name for name, decides in declared(kind, *others).items() if decides & what)


def shared(source: msgspec.Struct, target: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values of the fields that two structs have in common, as arguments of the second."""
    return {name: getattr(source, name) for name in target.__struct_fields__ if name in source.__struct_fields__}


def assigned(texts: Iterable[str], flag: str, names: Collection[str]) -> dict[str, str]:
    """Return the text of each field of ``names`` in texts like ``overlap=poll,off,leaves=4``, each field once.

    A part without ``=`` belongs to the value before it, and so does a setting of such a value, like that of
    ``strategy=pipeline:stages=2,order=1f1b``. Raises ``ConfigError`` for an unknown name with the nearest one.
    """
    values: dict[str, str] = {}
    for text in texts:
        last = ""
        for part in text.split(","):
            name, equals, value = (each.strip() for each in part.partition("="))
            if last and (not equals or (name not in names and ":" in values[last])):
                values[last] += f",{part}"
                continue
            if name and equals and name not in names:
                raise unknown(f"field in {flag}", name, sorted(names))
            if not (name and equals and value) or name in values:
                allowed = f"fields, each once: {flag} NAME=VALUE,NAME=VALUE"
                raise ConfigError(f"{flag} is {text!r}", allowed=allowed, remedy=f"the names: {', '.join(names)}")
            values[name], last = value, name
    return values
