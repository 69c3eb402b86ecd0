"""The flags that several commands share, each with one meaning, and how their values are read."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ForwardRef, TypeVar, cast, dataclass_transform, get_args

from cyclopts import App, Parameter

from dpsim.cli.outputs import writable as writable
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.collective import Layout
    from dpsim.fields import Field

T = TypeVar("T")
_MOST_DIGITS = 18
_SEVERAL = "..."
DELIMITER = "--"
"""What stands before the arguments of a script."""
_WAIT, _WAIT_DEFAULT, _LEAST_WAIT_S = "--wait-until-quiet", "10m", 10.0
WORDS = "\n\nWords and formulas: docs/glossary.md and docs/formulas.md of dpsim."
"""How the help of ``dpsim``, and of commands that predict, ends."""


@dataclass(frozen=True)
class _Flag:
    default: Any
    parameter: dict[str, Any]


def flag(help: str, *, default: Any = None, **parameter: Any) -> Any:
    """Return the declaration of a flag in the body of a class of ``Flags``: its help, and what else cyclopts takes."""
    return _Flag(default, {"help": help} | parameter)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(flag,))
class Flags:
    """Flags of a command, after the names of the fields that they set: ``class Run(Flags, of="model devices...")``.

    Type and help of a flag are those of the field (``dpsim.fields``), and with ``...`` the flag takes a list. Flags of
    the body of a class are the command's alone, or have a help of their own; help pages have them at the end, or where
    ``of`` names them, under the title ``group``; ``flag`` says what they are. Everything that is declared is loaded
    only when a command with such flags runs or shows its help.
    """

    several: ClassVar[dict[str, bool]] = {}
    """The fields that have flags, in the order of the help, and whether each takes a list."""

    def __init_subclass__(cls, of: str = "", group: str | None = None) -> None:
        named = {word.removesuffix(_SEVERAL): word.endswith(_SEVERAL) for word in of.split()}
        own = inspect.get_annotations(cls)
        for name, kind in inspect.get_annotations(cls, eval_str=True).items():
            if isinstance(said := vars(cls).get(name), _Flag):
                yes_or_no: dict[str, Any] = {"negative": ""} if kind in (bool, bool | None) else {}
                yes_or_no |= {"show_default": False} if said.default is False else {}
                own[name] = Annotated[kind, Parameter(**yes_or_no | said.parameter)]
                setattr(cls, name, said.default)
        for name in named.keys() - own.keys():
            setattr(cls, name, None)
        derived = {
            name: ForwardRef(f"annotation_of_flag({name!r}, {several})", module=__name__)
            for name, several in named.items()
        }
        cls.__annotations__ = derived | own
        cls.several = cls.several | named
        titled: dict[str, Any] = {} if group is None else {"group": group}
        Parameter(name="*", **titled)(dataclass(frozen=True, kw_only=True)(cls))

    def given(self) -> dict[str, Any]:
        """Return the flags that are given, with another value than their default."""
        defaults = {each.name: each.default for each in fields(cast("Any", self))}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    def values(self) -> dict[str, Any]:
        """Return the values of the fields whose flags are given, of one ``devices`` its ``layout`` too.

        Raises ``ConfigError``.
        """
        known, values = known_fields(), dict[str, Any]()
        for name, several in self.several.items():
            given = getattr(self, name)
            if given is None or name not in known:
                continue
            if several:
                values[name] = _list(name, known[name], given)
            elif name == "devices":
                values["devices"], values["layout"] = layout(given)
            else:
                values[name] = _reader(name)(given) if isinstance(given, str) else given
        return values


def known_fields() -> dict[str, Field]:
    """Return the declarations of all fields that flags may set."""
    from dpsim import fields
    from dpsim.records.train import TrainConfig
    from dpsim.setting import FIELDS, Setting

    return fields.fields(TrainConfig, Setting) | FIELDS


def flag_of(name: str) -> str:
    """Return the flag of a field, whose unit is part of its value: ``--cycle`` of ``cycle_s``."""
    return f"--{re.sub('(_s|_bytes)$', '', name).replace('_', '-')}"


def annotation_of_flag(name: str, several: bool) -> Any:
    """Return the annotation of a flag as cyclopts reads it."""
    field = known_fields()[name]
    kind, flag = _plain(field), flag_of(name)
    read_by_cyclopts = kind in (int, float, bool) or all(isinstance(word, str) for word in get_args(kind) or [kind])
    has_unit = flag.replace("-", "_") != f"__{name}"
    if several or has_unit or field.more_words or name == "devices" or not read_by_cyclopts:
        kind = str
    negative, text = "" if kind is bool else None, field.several if several else field.text
    return Annotated[kind | None, Parameter(name=flag, negative=negative, help=text)]


def _plain(field: Field) -> Any:
    """Return the type of a field without ``None``."""
    kinds = [kind for kind in get_args(field.kind) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else field.kind


def _reader(name: str) -> Callable[[str], Any]:
    """Return the function that reads a value of a field whose flag is a text."""
    from dpsim.units import parse_duration

    return parse_duration if name.endswith("_s") else threshold if name.endswith("_bytes") else str


def _list(name: str, field: Field, text: str) -> tuple[Any, ...] | None:
    if name == "network":
        return networks(text)
    if name == "strategy":
        from dpsim.strategy import parse_strategies

        return (text,) if text == "all" else parse_strategies(text)
    flag = flag_of(name)
    if name == "devices":
        return listed(flag, text, devices_or_layout)
    return listed(flag, text, whole(flag) if _plain(field) is int else _reader(name))


TorchModule = Annotated[
    str | None,
    Parameter(
        name="--torch-module", help="In place of --torch-script: a module, as python -m runs it, like package.train."
    ),
]
LearningRate = Annotated[float | None, Parameter(help="Learning rate (sgd 0.05, adamw 0.001, lars 1).")]
RateDecay = Annotated[
    str | None,
    Parameter(
        name="--schedule",
        help="Learning rate over time: constant; step:10,15 (times 0.1 from epoch 10 on, and again from 15 on;"
        " step:10,15,gamma=0.2: times 0.2); cosine (ends at 0); cosine:0.01 (ends at 0.01 of the rate).",
    ),
]
WarmupEpochs = Annotated[
    float | None,
    Parameter(
        help="Epochs in which the learning rate rises to its value; with --reference-batch, from the unscaled one."
    ),
]
ReferenceBatch = Annotated[
    int | None, Parameter(help="Multiply the learning rate by the global batch divided by this number of samples.")
]
StallAfter = Annotated[
    float | None, Parameter(help="Seconds of waiting after which a stall is reported (60); 0 or inf: never.")
]
CheckpointFolder = Annotated[
    Path | None,
    Parameter(name="--checkpoint", help="Folder for checkpoints. One is written at the end; the last two are kept."),
]
Resume = Annotated[
    Path | None,
    Parameter(
        help="Resume from the newest checkpoint in this folder, with its model, data and settings. --devices and the"
        " flags of network and fusion may differ; --epochs and --steps count from the beginning."
    ),
]
Hostfile = Annotated[
    Path | None, Parameter(help="File of hosts to start ranks on, with lines like node1:4 or node1 slots=4.")
]
ScriptMayWrite = Annotated[
    bool | None,
    Parameter(negative="", help="Let the script change your files; otherwise what it writes is discarded."),
]
WaitUntilQuiet = Annotated[
    str | None,
    Parameter(
        name=_WAIT,
        help="First wait, for 10m or the time that is given, until other processes use less than 5% of the cores.",
    ),
]
AllTables = Annotated[bool, Parameter(name="--verbose", negative="", help="Show all tables and all warnings too.")]
Json = Annotated[
    bool, Parameter(negative="", show_default=False, help="Print one JSON object on stdout, progress on stderr.")
]


class LeafFlags(Flags, of="reproducible leaves"):
    """Whether training is reproducible, and by how many leaves."""

    reproducible: Annotated[
        bool | None,
        Parameter(negative="", help="Compute the same bits on any number of devices, up to the number of leaves."),
    ] = None

    def values(self) -> dict[str, Any]:
        """Return the leaves that are given, or those of reproducible training. Raises ``ConfigError``."""
        from dpsim.plan import DEFAULT_LEAVES

        values = super().values()
        if self.reproducible and values.get("leaves") == 0:
            raise ConfigError(
                "--reproducible with --leaves 0: sums would depend on the number of devices",
                allowed="--leaves of 1 or more with --reproducible",
                remedy="leave --leaves out for 8 leaves, or leave --reproducible out",
            )
        return {"leaves": DEFAULT_LEAVES} | values if self.reproducible else values


def group(name: str, help: str, examples: str) -> App:
    """A command that has commands of its own, like ``dpsim sweep``."""
    return App(name=name, help=help, help_format="plaintext", help_epilogue=examples)


def command(app: App, function: Callable[..., Any], examples: str | None = None, *, shown: str | None = None) -> None:
    """Add a command to ``app``, its default one without ``examples``; its help has the flags ``shown``, or all.

    A parameter of ``Flags`` may be left out.
    """
    kinds = inspect.get_annotations(function, eval_str=True)
    absent = {name: kind() for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Flags)}
    function.__kwdefaults__ = absent | (function.__kwdefaults__ or {})
    if examples is None:
        app.default(function)
    elif shown is None:
        app.command(function, help_epilogue=examples)
    else:
        more = f"dpsim {function.__name__} --help-all shows all flags.\n\n"
        app.command(function, help_epilogue=more + examples, help_formatter=_SomeFlags(shown.split()))


class _SomeFlags:
    """What draws a help page with the flags ``shown`` alone."""

    def __init__(self, shown: Sequence[str]) -> None:
        self.shown = {*shown}

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        from cyclopts.help import DefaultFormatter

        if panel.format == "parameter":
            entries = [each for each in panel.entries if not each.positive_names or {*each.positive_names} & self.shown]
            panel = panel.copy(entries=entries)
        if panel.entries:
            DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)


def listed(flag: str, text: str | None, read: Callable[[str], T]) -> tuple[T, ...] | None:
    """The comma-separated parts of ``text``, each converted by ``read``; None stays None. Raises ``ConfigError``."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} is {text!r}", allowed="values separated by single commas")
    return tuple(read(part) for part in parts)


def whole(flag: str) -> Callable[[str], int]:
    """A function that reads whole numbers of 1 or more, for ``listed``."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}", allowed="whole numbers of 1 or more")
        return int(text)

    return read


def threshold(text: str) -> float:
    """A fusion threshold in bytes; warns of a bare number that is hardly meant in bytes. Raises ``ConfigError``."""
    from dpsim.units import parse_size

    size_bytes = parse_size(text)
    if text.strip().isdecimal() and 0 < size_bytes < 1024:
        number = text.strip()
        print(
            f"warning: --fusion-threshold {number} means {number} bytes; write {number}MB or {number}MiB for more",
            file=sys.stderr,
        )
    return size_bytes


def memory(text: str) -> float:
    """The bytes of ``--memory``. Raises ``ConfigError``."""
    from dpsim.units import parse_size

    size_bytes = parse_size(text)
    if not size_bytes:
        raise ConfigError(f"--memory is {text!r}", allowed="more than 0 bytes, like 16GiB")
    return size_bytes


def budget(text: str | None) -> float | None:
    """The seconds of a budget like ``90s`` or ``2min``; a bare number is in seconds. Raises ``ConfigError``."""
    from dpsim.units import parse_duration

    if text is None:
        return None
    return parse_duration(f"{text}s" if text.strip().isdecimal() else text)


def with_wait(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line, with the time that ``--wait-until-quiet`` waits where none follows it."""
    words = list(arguments)
    for number, word in enumerate(itertools.takewhile(lambda word: word != "--", arguments)):
        if word == _WAIT and not "".join(words[number + 1 : number + 2])[:1].isdecimal():
            words[number] = f"{_WAIT}={_WAIT_DEFAULT}"
    return words


def with_delimiter(arguments: Sequence[str]) -> list[str]:
    """Return the words of a ``sweep`` with ``--`` twice: the second is a word, and a script's arguments follow it."""
    words = list(arguments)
    if words[:1] == ["sweep"] and DELIMITER in words:
        words.insert(words.index(DELIMITER), DELIMITER)
    return words


def wait(text: str | None) -> float | None:
    """The seconds of ``--wait-until-quiet``, like ``10m``; a bare number is in seconds. Raises ``ConfigError``."""
    seconds = budget(None if text is None else re.sub(r"(?<=[0-9])m$", "min", text.strip()))
    if seconds is not None and seconds < _LEAST_WAIT_S:
        raise ConfigError(f"{_WAIT} {text}", allowed="10s or more: for so long the cores have to be quiet")
    return seconds


def layout(text: str) -> tuple[int, Layout]:
    """(devices, layout) of a value of ``--devices``, ``8`` or ``2x4``. Raises ``ConfigError``."""
    from dpsim.collective import parse_devices

    try:
        return parse_devices(text)
    except ConfigError as error:
        raise ConfigError(f"--{error.given}", allowed=error.allowed) from error


def devices_or_layout(text: str) -> int | str:
    """A value of ``--devices`` as a number, or as a layout of several nodes; for ``listed``."""
    devices, node_layout = layout(text)
    return node_layout or devices


def counts_or_layouts(text: str) -> tuple[int | str, ...]:
    """The values of ``--devices``. Raises ``ConfigError``.

    Of these ``8..1024`` are 8, 16, 32 and so on, and 1024, and ``1x8..128x8`` as many nodes of 8 devices.
    """
    values: list[int | str] = []
    for part in listed("--devices", text, str) or ():
        first, dots, last = part.partition("..")
        if not dots:
            values.append(devices_or_layout(part))
            continue
        (first, cross, of_a_node), (last, last_cross, of_a_last) = first.partition("x"), last.partition("x")
        begin, end = map(whole(f"an end of --devices {part}"), (first, last))
        if begin > end or (cross, of_a_node) != (last_cross, of_a_last):
            allowed = "the smaller number first, as in 8..1024, or nodes of as many devices, as in 1x8..128x8"
            raise ConfigError(f"--devices is {part!r}", allowed=allowed)
        numbers = [begin << doublings for doublings in range((end // begin).bit_length())]
        numbers += [end] if numbers[-1] != end else []
        values += [devices_or_layout(f"{number}{cross}{of_a_node}") for number in numbers]
    return tuple(dict.fromkeys(values))


def networks(text: str | None) -> tuple[str, ...] | None:
    """The networks in a list like ``node,paced:50us,1gbit`` (two: the name of a paced one contains a comma)."""
    if text is None:
        return None
    parts = re.findall(r"paced:[^,]*,[^,]*|[^,]+", text)
    if not parts:
        raise ConfigError(f"--network is {text!r}", allowed="node, or paced:LATENCY,BANDWIDTH, or several of them")
    return tuple(part.strip() for part in parts)


def provided(**values: object) -> dict[str, Any]:
    """The values that are not None. A flag that the user leaves out keeps the default of the class it configures."""
    return {name: value for name, value in values.items() if value is not None}


def program(script: str | None, module: str | None) -> str:
    """What ``--torch-script`` or ``--torch-module`` names: a script's path or a module. Raises ``ConfigError``."""
    from dpsim.launch.user_script import is_module

    if (script is None) == (module is None):
        given = "neither --torch-script nor --torch-module" if script is None else "--torch-script and --torch-module"
        raise ConfigError(given, allowed="one of the two")
    if module is not None and not is_module(module):
        raise ConfigError(
            f"--torch-module is {module!r}",
            allowed="package.module, which python -m would run",
            remedy="name a script by its path with --torch-script",
        )
    if script is not None and is_module(script):
        raise ConfigError(
            f"--torch-script is {script!r}",
            allowed="the path of a Python script, which ends in .py",
            remedy=f"a module, which python -m would run, is named so: --torch-module {script}",
        )
    return script or module or ""
