"""What a field of a configuration decides, declared on the field itself: what identifies a training follows from it.

``devices: Annotated[int, Decides.SHARES | Decides.STEP_TIME]`` declares a field. Which fields make another training,
which need a profile or a calibration of their own, and what a resumed run may change are derived: nobody lists fields
by hand, so that a new one belongs to all of these as soon as it is declared.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, get_type_hints

import msgspec


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


@functools.cache
def declared(kind: type[msgspec.Struct], *others: type[msgspec.Struct]) -> dict[str, Decides]:
    """Return what each field of a struct decides; one that ``others`` have too decides what is declared there.

    Raises ``TypeError`` for a field that declares nothing.
    """
    known = {name: value for other in others for name, value in declared(other).items()}
    found: dict[str, Decides] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in kind.__struct_fields__:
            continue
        own = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Decides)]
        if not own and name not in known:
            raise TypeError(f"{kind.__name__}.{name} does not declare what it decides (dpsim.fields.Decides)")
        found[name] = own[0] if own else known[name]
    return found


def deciding(what: Decides, kind: type[msgspec.Struct], *others: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of the fields that decide any of ``what``, in the order of the struct."""
    return tuple(name for name, decides in declared(kind, *others).items() if decides & what)


def shared(source: msgspec.Struct, target: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values of the fields that two structs have in common, as arguments of the second."""
    return {name: getattr(source, name) for name in target.__struct_fields__ if name in source.__struct_fields__}
