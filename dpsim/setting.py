"""``Setting``: what is run. ``Grid``: a base setting and axes over any of its fields."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.collective import parse_devices
from dpsim.columns import Column
from dpsim.constraints import DDP_OVERLAPS, FSDP, LIBRARIES, RUNTIMES, Runtime, check
from dpsim.dtypes import WireDtype
from dpsim.errors import ConfigError, DpsimError, unknown
from dpsim.fields import Decides, Field, deciding, fields
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import NODE, Network
from dpsim.plan import Plan, check_words, samples_of_step
from dpsim.strategy import DataParallel
from dpsim.units import format_size, parse_size

OVERLAP_CHOICES = ("auto", "all")
"""Values of the field ``overlap`` in a grid that a sweep replaces by mechanisms, once it has calibrated."""
Compute = Literal["real", "emulated"]
COMPUTES: tuple[Compute, ...] = ("real", "emulated")
DataSet = Annotated[
    str,
    Decides.BITS,
    "digits, digits:noise=SD,samples=N, synthetic:HxWxC,classes=K,train=N, cifar10:DIR, mnist:DIR,"
    " fashion-mnist:DIR, npz:FILE or npy:X.npy,Y.npy.",
    Column("name", "The data set, with its settings."),
]
Seed = Annotated[
    int,
    Decides.BITS,
    "Seed of initialisation and shuffling.",
    Column("count", "The seed of initialisation and shuffling."),
]
_ORDER = ("devices", "fusion_rule", "algorithm", "overlap", "global_batch")


class Setting(Noun, frozen=True):
    """A plan that trains a model on a network: the one place where a configuration stands.

    With ``compute`` emulated each rank waits for as long as the model computes, so that there may be more ranks than
    cores. ``repeat`` tells the two runs of an A/A pair apart (0 and 1). ``runtime`` says who trains: dpsim, or
    PyTorch's DDP, which communicates by gloo, by NCCL or through dpsim's MPI transports, or PyTorch's FSDP by gloo
    (``dpsim.constraints``).
    Raises ``ConfigError`` for an algorithm that the network or the runtime cannot run, and for what emulated compute
    cannot run.
    """

    plan: Annotated[Plan, Decides.NOTHING]
    model: Annotated[
        str,
        Decides.BITS | Decides.COMPUTE_TIME | Decides.NETWORK_TIME | Decides.PROBLEM,
        "cnn, mlp or resnet20; with widths: cnn:16,32,64, mlp:512,256, mlp:64x20; with settings: "
        "resnet20:norm=group (batch, layer, instance, group or none), mlp:512,dropout=0.2, cnn:crop=4,flip=0.5, "
        "mlp:64x4,column_blocks=4. "
        "Or your own: FILE.py:FUNCTION or python:PACKAGE.MODULE:FUNCTION, which returns a Replica.",
        Column("name", "The model that was trained."),
    ]
    network: Annotated[
        str,
        Decides.NETWORK_TIME | Decides.PROBLEM,
        "node (this machine), an emulated link paced:LATENCY,BANDWIDTH like paced:50us,1gbit, or hosts with links that "
        "the kernel shapes, shaped:HOSTSxBANDWIDTH like shaped:2x1gbit.",
        "Networks to compare: node,paced:50us,1gbit or shaped:4x200mbit,shaped:4x200mbit+slow-host=50%.",
        Column("name", "`node`, the machine as it is, an emulated link `paced:...`, or hosts `shaped:...`."),
    ] = NODE
    repeat: Annotated[
        int,
        Decides.NOTHING,
        Column("count", "0, or 1 for the second run of a setting that was run twice to see the noise."),
    ] = 0
    compute: Annotated[
        Compute,
        Decides.BITS | Decides.NETWORK_TIME | Decides.PROBLEM,
        "real, or emulated: ranks wait for the profiled times, so that they may outnumber the cores.",
    ] = "real"
    runtime: Annotated[
        Runtime,
        Decides.NETWORK_TIME,
        "Who trains a script: torch-ddp, or torch-ddp,dpsim: dpsim's runtime beside DDP, with emulated computation.",
        Column(
            "name",
            "Who trained: `dpsim`, or PyTorch's DDP by gloo (`torch-ddp-gloo`), by a hook over MPI (`torch-ddp-mpi`),"
            " by NCCL (`torch-ddp-nccl`) or by dpsim's hook for users (`torch-ddp-hook`), or its FSDP by gloo "
            "(`torch-fsdp-gloo`).",
        ),
    ] = "dpsim"

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise unknown("runtime", self.runtime, RUNTIMES)
        if self.compute not in COMPUTES:
            raise unknown("compute", self.compute, COMPUTES)
        values = {name: getattr(self.plan, name) for name in Plan.__struct_fields__}
        network = Network.parse(self.network)
        if self.runtime not in LIBRARIES:
            check("network", algorithm=self.plan.algorithm, network=network)
        check(devices=self.plan.devices, layout=self.plan.layout, network=network)
        for of in ("runtime", "compute"):
            check(of, runtime=self.runtime, compute=self.compute, network=network, **values)
        if self.repeat not in (0, 1):
            raise ConfigError(f"repeat is {self.repeat}", allowed="0, or 1 for the second run of an A/A pair")

    @property
    def emulated_compute(self) -> bool:
        """Whether ranks wait instead of computing."""
        return self.compute == "emulated"

    @property
    def where(self) -> str:
        """The network, who trains there if it is not dpsim, and whether computation is emulated on it.

        Times of different places are never mixed.
        """
        if self.runtime != "dpsim":
            return f"{self.network} ({self.runtime})"
        return f"{self.network} (emulated computation)" if self.emulated_compute else self.network

    @property
    def calibrated(self) -> Setting:
        """The same setting on the network that is calibrated for it: without the conditions of a shaped one."""
        plain = Network.parse(self.network).plain.token
        return self if plain == self.network else msgspec.structs.replace(self, network=plain)

    @property
    def first_run(self) -> Setting:
        """The same setting with ``repeat`` 0."""
        return msgspec.structs.replace(self, repeat=0)

    @property
    def devices_token(self) -> str:
        """The number of devices, or their layout: ``8`` or ``2x4``."""
        return self.plan.layout or str(self.plan.devices)

    @property
    def training(self) -> tuple[Any, ...]:
        """What decides the numbers that are trained: settings with the same training differ in their times alone."""
        return self.identity(Decides.BITS | Decides.SHARES)

    def identity(self, what: Decides) -> tuple[Any, ...]:
        """Return the values of all fields that decide any of ``what``, the plan's first."""
        plan = tuple(getattr(self.plan, name) for name in deciding(what, Plan))
        return plan + tuple(getattr(self, name) for name in deciding(what, Setting))

    @property
    def order(self) -> tuple[Any, ...]:
        """A key by which settings sort: network (this machine's own first), devices, ..., threshold, then the rest."""
        plan = self.plan
        leading = tuple(getattr(plan, name) for name in _ORDER)
        threshold = -1.0 if plan.fusion_threshold_bytes is None else plan.fusion_threshold_bytes
        return (
            self.network != NODE,
            self.network,
            self.emulated_compute,
            self.runtime,
            *leading,
            threshold,
            self.repeat,
            plan.layout,
            self.model,
            str(plan),
        )

    def value(self, name: str) -> Any:
        """The value of a field of ``FIELDS``."""
        if name == "devices":
            return self.devices_token
        return getattr(self if name in _OF_SETTING else self.plan, name)

    def text(self, name: str) -> str:
        """The value of a field as tables and messages write it."""
        value = self.value(name)
        if name == "fusion_threshold_bytes":
            takes_none = FUSION_RULES.find(self.plan.fusion_rule).default_threshold_bytes is None
            return "none" if takes_none else format_size(self.plan.threshold_bytes)
        if name == "optimizer":
            return type(value).__name__
        if name == "wire_dtype":
            return value or "as computed"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def describe(self) -> str:
        """``2 devices on node, 64 KiB, ring, overlap thread``, for messages."""
        plan = self.plan
        size = format_size(plan.threshold_bytes)
        devices = f"{self.devices_token} device{'s' if plan.devices > 1 else ''}"
        return f"{devices} on {self.where}, {size}, {plan.algorithm}, overlap {plan.overlap}"


def beside_fsdp(setting: Setting) -> Setting:
    """Return the setting in which DDP trains the script that FSDP trains in this one: the same batch, its own buckets.

    Any other setting is returned as it is.
    """
    if setting.runtime != FSDP:
        return setting
    overlap = DDP_OVERLAPS["torch-ddp-gloo"][0]
    ddp = {"strategy": DataParallel.name, "fusion_rule": "ddp", "overlap": overlap, "fusion_threshold_bytes": None}
    plan = msgspec.structs.replace(setting.plan, **ddp)
    return msgspec.structs.replace(setting, runtime="torch-ddp-gloo", plan=plan)


_OF_SETTING = {name: field for name, field in fields(Setting).items() if name not in ("plan", "repeat")}
_LOCAL_BATCH = Field(
    Decides.PROBLEM,
    "Samples that a device has at once: of a step it has as many in each micro-batch.",
    several="Numbers of samples that a device has at once: 8,16,32.",
    kind=int,
)
FIELDS = fields(Plan) | {"local_batch": _LOCAL_BATCH} | _OF_SETTING
"""What a grid may vary: every field of ``Plan``, the model, the network, whether computation is real or emulated, who
trains, and ``local_batch`` for weak scaling."""


Row = Mapping[str, Any]
T = TypeVar("T")


def setting_of(row: Row) -> Setting:
    """The setting of a row of a grid. Raises ``ConfigError``.

    ``devices`` may be a layout (``2x4``), a threshold may be written with its unit (``64KiB``), and with
    ``local_batch`` the global batch grows with the devices (``samples_of_step``). Left out, the algorithm is the
    network's default and the batch-norm mode that of the leaves. The overlaps ``auto`` and ``all`` stand for ``off``
    until a sweep has chosen.
    """
    fields = dict(row)
    of_setting = {name: fields.pop(name) for name in ("network", "compute", "runtime") if name in fields}
    if fields.get("overlap") in OVERLAP_CHOICES:
        fields["overlap"] = "off"
    network = Network.parse(str(of_setting.get("network", NODE)))
    plain = {"model": fields.pop("model", "mlp:64x20"), "plan": plan_fields(fields, network.default_algorithm)}
    return _converted(plain | of_setting, Setting, "a setting")


def plan_of(row: Row, default_algorithm: Callable[[WireDtype | None], str]) -> Plan:
    """Return the plan of a row of a grid that has a plan's fields alone, as ``setting_of`` reads it.

    ``default_algorithm`` names the algorithm where the row does not, by what the gradients are sent as.
    """
    plain = plan_fields(row, default_algorithm)
    check_words(plain)
    return _converted(plain, Plan, "a plan")


def plan_fields(row: Row, default_algorithm: Callable[[WireDtype | None], str]) -> dict[str, Any]:
    """Return the fields of the plan of a row of a grid; see ``plan_of``. Raises ``ConfigError``."""
    fields = dict(row)
    devices, layout = parse_devices(fields.pop("devices", 1))
    if (local_batch := fields.pop("local_batch", None)) is not None:
        if "global_batch" in fields:
            raise ConfigError(
                f"a local batch of {local_batch} and a global batch of {fields['global_batch']}",
                allowed="one of the two",
                remedy="give global_batch for strong scaling, local_batch for weak scaling",
            )
        strategy = fields.get("strategy", DataParallel.name)
        fields["global_batch"] = samples_of_step(local_batch, devices, fields.get("accumulate", 1), strategy)
    fields["fusion_threshold_bytes"] = threshold_bytes(fields.get("fusion_threshold_bytes"))
    if fields.get("algorithm") is None:
        fields["algorithm"] = default_algorithm(fields.get("wire_dtype"))
    if fields.get("batch_norm") is None:
        leaves = fields.get("leaves", 0)
        fields["batch_norm"] = Plan.default_batch_norm(leaves if isinstance(leaves, int) else 0)
    return fields | {"devices": devices, "layout": layout or fields.get("layout", "")}


def _converted(plain: dict[str, Any], kind: type[T], what: str) -> T:
    try:
        return codec.convert(plain, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, DpsimError):
            raise error.__cause__ from error
        raise ConfigError(f"{what} with a wrong value: {error}", allowed="the fields of dpsim.Plan") from error


def threshold_bytes(value: Any) -> Any:
    """A fusion threshold as a grid has it, in bytes: ``64KiB`` is 65536.0, and what is no text stays as it is."""
    return parse_size(value) if isinstance(value, str) else value


def _spelled(name: str, value: Any) -> str:
    """Return the one spelling of a value of a field: ``1MiB``, ``1024KiB`` and 1048576 are the same threshold."""
    plain = threshold_bytes(value) if name == "fusion_threshold_bytes" else value
    return repr(int(plain) if isinstance(plain, float) and plain.is_integer() else plain)


class Grid(Noun, frozen=True):
    """Settings: those of ``base``, with every case of ``cases`` and every combination of the values of ``axes``.

    Fields are those of ``FIELDS``, their values plain ones, as a file or ``--json`` writes them. A case is a table of
    fields that change together, such as a network and the algorithm that suits it. The last axis varies fastest.
    """

    base: dict[str, Any] = msgspec.field(default_factory=dict)
    axes: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    cases: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in itertools.chain(self.base, self.axes, *self.cases):
            if name not in FIELDS:
                raise unknown("field of a setting", name, FIELDS)
        for name, values in self.axes.items():
            if not values:
                raise ConfigError(f"{name} is []", allowed="one or more different values")
        for name, values in self.axes.items():
            if len({_spelled(name, value) for value in values}) < len(values):
                raise ConfigError(f"{name} is {list(values)}", allowed="one or more different values")
        for name in self.axes:
            if name in self.base or any(name in case for case in self.cases):
                raise ConfigError(
                    f"{name} is an axis, and has a value in [base] or [[cases]] as well", allowed="one of the two"
                )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return the grid of these fields: a list or tuple of several values is an axis, an empty one is left out."""
        several = {name: tuple(each) for name, each in values.items() if isinstance(each, (tuple, list))}
        of_one = {name: each[0] if each else None for name, each in several.items() if len(each) < 2}
        return cls().changed(**values | several | of_one)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """The fields of each setting."""
        return tuple(
            self.base | case | dict(zip(self.axes, values, strict=True))
            for case in self.cases or ({},)
            for values in itertools.product(*self.axes.values())
        )

    @property
    def varied(self) -> tuple[str, ...]:
        """The fields that have more than one value, cases first."""
        names = dict.fromkeys(itertools.chain(*self.cases, self.axes))
        return tuple(name for name in names if len(self.values(name)) > 1)

    def values(self, name: str) -> tuple[Any, ...]:
        """The different values of a field in the order of the rows; none where it is given nowhere."""
        if name in self.axes:
            return tuple(self.axes[name])
        values: list[Any] = []
        for row in (self.base | case for case in self.cases or ({},)):
            if name in row and row[name] not in values:
                values.append(row[name])
        return tuple(values)

    def value(self, name: str) -> Any:
        """The value of a field that does not vary, or ``None`` where it is given nowhere."""
        return next(iter(self.values(name)), None)

    def changed(self, **values: Any) -> Self:
        """Return the grid with other values of some fields.

        A tuple becomes an axis. A field with one value is part of the base, and ``None`` leaves it out.
        """
        base = {name: value for name, value in self.base.items() if name not in values}
        axes = {name: given for name, given in self.axes.items() if name not in values}
        cases = tuple({name: value for name, value in case.items() if name not in values} for case in self.cases)
        for name, value in values.items():
            if isinstance(value, tuple):
                axes[name] = value
            elif value is not None:
                base[name] = value
        distinct = tuple(case for place, case in enumerate(cases) if case and case not in cases[:place])
        order = dict.fromkeys(name for name in (*self.axes, *values) if name in axes)
        ordered = {name: axes[name] for name in order}
        return msgspec.structs.replace(self, base=base, axes=ordered, cases=distinct)

    def completed(self, defaults: Row) -> Self:
        """Return the grid with ``defaults`` for the fields that it gives nowhere."""
        return self.changed(**{name: value for name, value in defaults.items() if not self.values(name)})


def settings_of(rows: Iterable[Row]) -> tuple[Setting, ...]:
    """The settings of the rows. Raises one ``ConfigError`` that names every row that is impossible, and why."""
    settings, mistakes = [], dict[str, list[tuple[ConfigError, str]]]()
    rows = list(rows)
    for row in rows:
        try:
            settings.append(setting_of(row))
        except DpsimError as error:
            refused = error if isinstance(error, ConfigError) else ConfigError(str(error))
            mistakes.setdefault(refused.given, []).append((refused, _short(row, rows)))
    if not mistakes:
        return tuple(settings)
    first = next(iter(mistakes.values()))[0][0]
    if len(mistakes) == 1:
        (refusals,) = mistakes.values()
        where = "" if len(refusals) == len(rows) else f" (settings: {'; '.join(name for _, name in refusals)})"
        raise ConfigError(f"{first.given}{where}", allowed=first.allowed, remedy=first.remedy)
    reasons = [f"{given} (settings: {'; '.join(name for _, name in each)})" for given, each in mistakes.items()]
    raise ConfigError(
        f"{sum(map(len, mistakes.values()))} of {len(rows)} settings are impossible: " + "; ".join(reasons),
        allowed="; ".join(dict.fromkeys(each[0][0].allowed for each in mistakes.values() if each[0][0].allowed)),
        remedy="take these values out of the grid",
    )


def _short(row: Row, rows: list[Row]) -> str:
    """The fields by which a row differs from others: ``devices 4, algorithm ring``."""
    names = [name for name in row if any(other.get(name) != row[name] for other in rows)]
    return ", ".join(f"{name} {row[name]}" for name in names) or "the only one"
