"""The flags that several commands share, each with one meaning, and how their values are read."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ForwardRef, TypeVar, cast, dataclass_transform, get_args

from cyclopts import App, Parameter

from dpsim.cli.outputs import writable as writable
from dpsim.cli.readers import MOST_DIGITS, devices_or_layout, layout, listed, networks, threshold, whole_numbers
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.fields import Field

T = TypeVar("T")
_SEVERAL = "..."
_UNITS = ("_s", "_bytes")
SET = "--set"
"""The flag of the fields that few change."""
DELIMITER = "--"
"""What stands before the arguments of a script."""
_WAIT, _WAIT_DEFAULT = "--wait-until-quiet", "10m"
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
    ``of`` names them, under the title ``group``; ``flag`` says what they are. The fields ``by_set`` have no flags of
    their own but one, ``--set NAME=VALUE``. Everything that is declared is loaded only when a command with such flags
    runs or shows its help.
    """

    several: ClassVar[dict[str, bool]] = {}
    """The fields that may be given, in the order of the help, and whether each takes a list."""
    by_set: ClassVar[tuple[str, ...]] = ()
    """Those of them that have no flag of their own."""

    def __init_subclass__(cls, of: str = "", by_set: str = "", group: str | None = None) -> None:
        named, without_flag = (
            {word.removesuffix(_SEVERAL): word.endswith(_SEVERAL) for word in words.split()} for words in (of, by_set)
        )
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
        if without_flag:
            names = ", ".join(without_flag)
            text = f"Fields that few change, as NAME=VALUE,NAME=VALUE; may be repeated (docs/grid.md): {names}."
            own["set"] = Annotated[list[str] | None, Parameter(name=SET, negative="", help=text)]
            cls.by_set = tuple(without_flag)
            setattr(cls, "set", None)  # noqa: B010
        cls.__annotations__ = derived | own
        cls.several = cls.several | named | without_flag
        titled: dict[str, Any] = {} if group is None else {"group": group}
        Parameter(name="*", **titled)(dataclass(frozen=True, kw_only=True)(cls))

    def given(self) -> dict[str, Any]:
        """Return the flags that are given, with another value than their default, and the fields of ``--set``."""
        defaults = {each.name: each.default for each in fields(cast("Any", self))}
        chosen = {name: value for name, value in vars(self).items() if value != defaults[name] and name != "set"}
        return chosen | self._assigned()

    def _assigned(self) -> dict[str, str]:
        """Return the texts of ``--set``. Raises ``ConfigError`` for fields that have been given by their flags, too."""
        from dpsim.fields import assigned

        texts = vars(self).get("set")
        values = assigned(texts, SET, [*self.several]) if texts else {}
        for name, text in values.items():
            if vars(self).get(name) is not None:
                given = f"{flag_of(name)} {vars(self)[name]} and {SET} {name}={text}"
                raise ConfigError(given, allowed="one of the two", remedy=f"leave {SET} {name} out")
        return values

    @classmethod
    def spelled(cls, *names: str) -> str:
        """Return how fields are given: ``--devices, --set overlap``."""
        return ", ".join(f"{SET} {name}" if name in cls.by_set else flag_of(name) for name in names)

    def values(self, **read: Callable[[str], Any]) -> dict[str, Any]:
        """Return the values of the fields that are given, of one ``devices`` its ``layout`` too.

        ``read`` has functions that read the values of some lists, by the names of the fields. ``reproducible``, where a
        class has such a flag, stands for the default number of leaves. Raises ``ConfigError``.
        """
        all_fields, assigned, values = known_fields(), self._assigned(), dict[str, Any]()
        for name, lists in self.several.items():
            value = assigned.get(name, vars(self).get(name))
            if value is None or name not in all_fields:
                continue
            if name in read:
                values[name] = listed(self.spelled(name), value, read[name])
            elif lists:
                values[name] = _list(name, self.spelled(name), all_fields[name], value)
            elif name == "devices":
                values["devices"], values["layout"] = layout(value)
            elif name in assigned:
                values[name] = _one(name, all_fields[name], value)
            else:
                values[name] = _reader(name)(value) if isinstance(value, str) else value
        if not vars(self).get("reproducible"):
            return values
        from dpsim.plan import DEFAULT_LEAVES

        if values.get("leaves") == 0:
            raise ConfigError(
                f"--reproducible with {SET} leaves=0: sums would depend on the number of devices",
                allowed="leaves of 1 or more with --reproducible",
                remedy=f"leave {SET} leaves out for {DEFAULT_LEAVES} leaves, or leave --reproducible out",
            )
        return {"leaves": DEFAULT_LEAVES} | values


def known_fields() -> dict[str, Field]:
    """Return the declarations of all fields that flags may set."""
    from dpsim import fields
    from dpsim.learning_rate import RateSchedule
    from dpsim.optimizer import AdamW, Lars, Sgd
    from dpsim.records.train import TrainConfig
    from dpsim.setting import FIELDS, Setting

    of_training = [fields.fields(kind) for kind in (AdamW, Lars, Sgd, RateSchedule)]
    return functools.reduce(operator.or_, of_training) | fields.fields(TrainConfig, Setting) | FIELDS


def by_set(function: Callable[..., Any] | None) -> tuple[str, ...]:
    """Return the fields that a command takes by ``--set`` alone."""
    kinds = {} if function is None else inspect.get_annotations(function, eval_str=True)
    return tuple(
        name for kind in kinds.values() if isinstance(kind, type) and issubclass(kind, Flags) for name in kind.by_set
    )


def flag_of(name: str) -> str:
    """Return the flag of a field without its unit: ``--fusion-threshold`` of ``fusion_threshold_bytes``."""
    plain = next((name.removesuffix(unit) for unit in _UNITS if name.endswith(unit)), name)
    return f"--{plain.replace('_', '-')}"


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

    seconds, size = _UNITS
    return parse_duration if name.endswith(seconds) else threshold if name.endswith(size) else str


def _one(name: str, field: Field, text: str) -> Any:
    """Return a value of ``--set``, as the flag of the field would read it. Raises ``ConfigError``."""
    kind, words = _plain(field), get_args(_plain(field))
    if kind is bool:
        words = ("yes", "no")
    is_number = kind in (int, float) and not name.endswith(_UNITS)
    if kind is bool or (words and all(isinstance(word, str) for word in words) and not field.more_words):
        if text not in words:
            raise ConfigError(f"{SET} {name}={text}", allowed=", ".join(words))
        return text == "yes" if kind is bool else text
    if not is_number:
        return _reader(name)(text)
    try:
        return kind(text) if len(text) <= MOST_DIGITS else kind("too long")
    except ValueError:
        allowed = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{SET} {name}={text}", allowed=allowed) from None


def _list(name: str, flag: str, field: Field, text: str) -> tuple[Any, ...] | None:
    if name == "network":
        return networks(text)
    if name == "strategy":
        from dpsim.strategy import parse_strategies

        return (text,) if text == "all" else parse_strategies(text)
    if name == "devices":
        return listed(flag, text, devices_or_layout)
    return listed(flag, text, whole_numbers(flag) if _plain(field) is int else _reader(name))


RateDecay = Annotated[
    str | None,
    Parameter(
        name="--schedule",
        help="Learning rate over time: constant; step:10,15 (times 0.1 from epoch 10 on, and again from 15 on;"
        " step:10,15,gamma=0.2: times 0.2); cosine (ends at 0); cosine:0.01 (ends at 0.01 of the rate).",
    ),
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
EXECUTOR = (
    "What predicts: a number of processes, or MODULE:FACTORY or FILE.py:FACTORY of a concurrent.futures.Executor"
    " (docs/predict.md)."
)
Executor = Annotated[str, Parameter(help=EXECUTOR)]
ScriptMayWrite = Annotated[
    bool | None,
    Parameter(negative="", help="Let the script change your files; otherwise what it writes is discarded."),
]
Python = Annotated[
    str | None, Parameter(help="The Python that the script runs with (that of the active environment with PyTorch).")
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


Reproducible = Annotated[
    bool | None,
    Parameter(negative="", help="Compute the same bits on any number of devices, up to the number of leaves (8)."),
]


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
        app.help_formatter = _HelpInGroups(None)
        return
    more = "" if shown is None else f"dpsim {function.__name__} --help-all shows all flags.\n\n"
    formatter = _HelpInGroups(None if shown is None else shown.split())
    app.command(function, help_epilogue=more + examples, help_formatter=formatter)


_GROUPS = {
    "On what": "--devices --network --machine --algorithm --backend --hostfile --compute --peers --cpus --executor",
    "How long": "--steps --epochs --seeds --budget --wait-until-quiet --stall-after --time",
    "Output": "--output --json --json-line --verbose --plot --page --format --record --checkpoint --checkpoint-every"
    " --check --dry-run",
}
"""The flags of the groups of a help page; the others are those of what is asked."""


class _HelpInGroups:
    """What draws a help page in groups, with the flags ``shown`` alone, or with all."""

    def __init__(self, shown: Sequence[str] | None) -> None:
        self.shown = shown

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        from cyclopts.help import DefaultFormatter

        def names(entry: Any) -> set[str]:
            return {*entry.positive_names}

        panels = [panel]
        if panel.format == "parameter":
            entries = [
                each for each in panel.entries if self.shown is None or not names(each) or names(each) & {*self.shown}
            ]
            grouped = {
                title: [each for each in entries if names(each) & {*of.split()}] for title, of in _GROUPS.items()
            }
            what = [each for each in entries if not any(each in group for group in grouped.values())]
            panels = [panel.copy(entries=entries)]
            if panel.title == "Parameters":
                panels = [panel.copy(title=title, entries=of) for title, of in ({"What": what} | grouped).items()]
        for each in panels:
            if each.entries:
                DefaultFormatter()(console, options, each)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)


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
