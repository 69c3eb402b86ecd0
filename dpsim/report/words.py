"""How reports write numbers, networks and baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from dpsim.columns import Form
from dpsim.units import format_duration, format_rounded_size, format_size

SHORT = 8
"""The first digits of a digest, by which people tell it from others."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
EMULATED_COMPUTE = " (emulated computation)"
_RUNTIMES = {
    "dpsim": "",
    "torch-ddp-gloo": ", PyTorch DDP by gloo",
    "torch-ddp-mpi": ", PyTorch DDP by an MPI hook",
    "torch-ddp-nccl": ", PyTorch DDP by NCCL",
    "torch-fsdp-gloo": ", PyTorch FSDP by gloo",
    "torch-ddp-hook": ", PyTorch DDP by dpsim's hook",
}
"""Who trained, as it is written behind the network."""
BASELINES = {
    "constant": "constant",
    "perfect_scaling": "perfect scaling",
    "alpha_beta_no_overlap": "no overlap",
    "largest_bucket": "largest bucket",
    "free_communication": "free communication",
    "nothing_hidden": "nothing hidden",
    "proportional_to_batch": "proportional to the batch",
}
"""The nulls that the model is scored against, by their names in records."""
PROFILED_BASELINES = ("free_communication", "nothing_hidden")
"""Those that know the computation of several devices as it was profiled."""


class OnNetwork(Protocol):
    """A point, group or effect on a network."""

    @property
    def network(self) -> str: ...
    @property
    def emulated_network(self) -> bool: ...
    @property
    def emulated_compute(self) -> bool: ...
    @property
    def runtime(self) -> str: ...


def milliseconds(seconds: float) -> str:
    """Return milliseconds without their unit, such as ``12.3``."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}" if value else "0"


def milliseconds_to(seconds: float, largest_s: float) -> str:
    """Return milliseconds with as many decimals as the largest time of the column needs for four digits."""
    decimals = next((d for d, top in ((0, 1000), (1, 100), (2, 10)) if largest_s * 1e3 >= top), 3)
    return f"{seconds * 1e3:.{decimals}f}"


def percent(share: float, *, sign: bool = False) -> str:
    """Return a share as ``1.2%`` or with its sign as ``+1.2%``."""
    decimals = 0 if abs(share) >= 0.995 else 1
    return f"{share * 100:{'+' if sign else ''}.{decimals}f}%"


def digits(value: float | None, count: int) -> str:
    """Return a number with this many significant digits, or nothing for ``None``."""
    return "" if value is None else f"{value:.{count}g}"


FORMS: dict[Form, Callable[[Any], str]] = {
    "": lambda value: f"{value:g}" if isinstance(value, float) else str(value),
    "percent": percent,
    "signed percent": functools.partial(percent, sign=True),
    "times": lambda value: f"{value:.2f}x",
    "digits": functools.partial(digits, count=2),
    "four digits": functools.partial(digits, count=4),
    "duration": format_duration,
    "size": format_rounded_size,
    "threshold": lambda value: "-" if value is None else format_size(value),
    "memory": lambda parts: format_size(parts["total"] or 0) + " +" * (parts["activations"] is None),
    "short": lambda value: value[:SHORT],
}
"""How a value is written, by the form that its column declares; milliseconds depend on the largest of a table."""


def network_name(item: OnNetwork) -> str:
    """Return the network's token, marked where the network is emulated, computation is, or PyTorch's DDP trains."""
    if item.emulated_network and item.emulated_compute:
        return f"{item.network} (emulated, as is computation)"
    name = f"{item.network} (emulated)" if item.emulated_network else item.network
    return name + EMULATED_COMPUTE * item.emulated_compute + _RUNTIMES.get(item.runtime, f", {item.runtime}")


def field_name(name: str, runtime: str = "dpsim") -> str:
    """Return a field of a setting as reports write it: ``fusion threshold``, a ``bucket cap`` for DDP."""
    if name == "fusion_threshold_bytes" and runtime != "dpsim":
        return "bucket cap"
    return name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def threshold_noun(runtime: str) -> str:
    """Return what sentences call the fusion threshold: ``threshold``, or for PyTorch's DDP ``bucket cap``."""
    return "threshold" if runtime == "dpsim" else field_name("fusion_threshold_bytes", runtime)


def interval_name(level: float | None) -> str:
    """Return ``90% interval``, or ``assumed interval`` where the predictions state no level."""
    return "assumed interval" if level is None else f"{level:.0%} interval"


def interval_sentence(level: float | None, studies: int, clusters: int = 0) -> str:
    """Return what tells how wide the predicted intervals are, as a sentence without its first capital and full stop."""
    if level is None and clusters:
        return (
            f"the intervals are 90% by assumption, from what predictions of published measurements missed on {clusters}"
            f" clusters; without the assumption that the next one is of their kind, {clusters / (clusters + 1):.0%}"
        )
    if level is None:
        return (
            "how wide the intervals are is assumed, for fewer than 9 past studies of this kind on this machine tell it:"
            " they need not hold the median of a later run with any stated probability"
        )
    return (
        f"the {level:.0%} intervals are of the median over a later run; the errors of {studies} past studies on this"
        " machine say how wide they are, so they hold as long as it behaves as it did then"
    )


def devices_name(devices: int) -> str:
    """Return ``1 device`` or ``2 devices``."""
    return counted(devices, "device")


def counted(number: int, noun: str) -> str:
    """Return ``1 point`` or ``2 points``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(parts: Sequence[str]) -> str:
    """Return the first three parts, and how many more there are."""
    return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


def enumerated(names: Iterable[str]) -> str:
    """Return different names in their order, as a sentence has them: ``devices, batch norm and local batch``."""
    *first, last = dict.fromkeys(names) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def skill_text(skill: float | None) -> str:
    """Return ``0.82``; ``none`` where the best baseline made no error. A skill far below 0 is not written out."""
    if skill is None:
        return "none"
    return "below -10" if skill < -10 else f"{skill:.2f}".replace("-0.00", "0.00")


def spreadsheet_text(value: Any) -> Any:
    """Return a cell of a CSV file: a text that a spreadsheet would take for a formula gets an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) and value != "-inf" else value
