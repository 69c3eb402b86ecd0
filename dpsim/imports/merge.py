"""Benchmark outputs as a Machine: which reader takes a file, on how many devices it ran, and one table of each kind."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from dpsim.algorithms import ALGORITHMS
from dpsim.codec import Noun
from dpsim.collective import FLAT, Collective, Layout, parse_devices
from dpsim.constraints import check
from dpsim.errors import ConfigError, FileFormatError, unknown
from dpsim.imports import nccl, nccl_report, nccl_text, others
from dpsim.imports.columns import FORMATS as TABLE_FORMATS
from dpsim.imports.lines import Source, read_source
from dpsim.imports.tables import Contents, Table
from dpsim.machine import AllreduceCost, Machine, Network
from dpsim.model.link_fit import fitted_links

T = TypeVar("T")
Format = Literal["nccl-tests", "osu", "imb"]
FORMATS: tuple[str, ...] = get_args(Format)


class ImportConfig(Noun, frozen=True):
    """Files that benchmarks printed, and what they do not say.

    ``format`` is found in each file where it is not given. ``devices`` and ``algorithms`` hold nothing, one entry
    for all files or one for each; an algorithm that is not named is the library's own: ``nccl`` of nccl-tests, else
    ``mpi``. ``out_of_place`` takes nccl-tests' out-of-place times in place of the in-place ones; OSU and IMB measure
    out of place only. ``keep_outliers`` keeps rows that alone are out of line with both their neighbours.
    """

    files: tuple[str, ...]
    format: Format | None = None
    devices: tuple[int | str, ...] = ()
    algorithms: tuple[str, ...] = ()
    network: str = "node"
    out_of_place: bool = False
    keep_outliers: bool = False

    def __post_init__(self) -> None:
        network = Network.parse(self.network)
        if self.format is not None and self.format not in FORMATS:
            raise unknown("format", self.format, FORMATS)
        for algorithm in self.algorithms or ("mpi",):
            if ALGORITHMS.find(algorithm).place != "elsewhere":
                check("network", algorithm=algorithm, network=network)
        if len({Path(file).resolve() for file in self.files}) != len(self.files) or not self.files:
            raise ConfigError(f"files are {list(self.files)}", allowed="one or more different files")
        for what, values in (("devices", self.devices), ("algorithm", self.algorithms)):
            if len(values) not in (0, 1, len(self.files)):
                raise ConfigError(
                    f"{what} {', '.join(map(str, values))} for {len(self.files)} files",
                    allowed=f"one --{what} for all files, or one for each in their order",
                )


@dataclass(frozen=True)
class Imported:
    """One table of the machine, the file it came from and what it measures there."""

    file: str
    benchmark: str
    measured: str
    cost: AllreduceCost
    doubts: tuple[str, ...]
    notes: tuple[str, ...]


def import_machine(config: ImportConfig) -> tuple[Machine, tuple[Imported, ...]]:
    """Return the machine that the files describe, and where each of its tables comes from.

    It has their tables, and links fitted to them (``fitted_links``) that price, as an extrapolation, algorithms without
    a table. It has no overlap, no slowdown and no memory, for the files say nothing of these.
    Raises ``FileFormatError`` for a file that cannot be believed, ``ConfigError`` for a number of devices that is
    missing or contradicts a file, and for a table given twice.
    """
    tables: list[Imported] = []
    hardware: list[str] = []
    devices = _one_each(config.devices or (None,), config.files)
    algorithms = _one_each(config.algorithms or (None,), config.files)
    for file, token, algorithm in zip(config.files, devices, algorithms, strict=True):
        devices_and_layout: tuple[int | None, Layout] = (None, FLAT) if token is None else parse_devices(token)
        contents = read(Path(file), config.format, devices_and_layout[0], config.out_of_place)
        hardware.append(contents.hardware)
        own = "nccl" if contents.benchmark.startswith("nccl-tests") else "mpi"
        tables += _imported(file, contents, algorithm or own, *devices_and_layout, keep_outliers=config.keep_outliers)
    _check_each_once(tables)
    named = dict.fromkeys(filter(None, hardware))
    made_by = dict.fromkeys(f"{Path(table.file).name}: {table.benchmark} ({table.measured})" for table in tables)
    measured_on = [
        f"{table.benchmark.split(',')[0]} on {table.cost.layout or table.cost.devices} devices" for table in tables
    ]
    allreduce = tuple(table.cost for table in tables if table.cost.kind == "allreduce")
    network = Network.parse(config.network)
    link, link_in_node = fitted_links(allreduce, emulated=network.emulated, wire_latency_s=network.wire_latency_s)
    machine = Machine(
        name="; ".join(named) or ", ".join(Path(file).stem for file in config.files),
        network=config.network,
        emulated_network=network.emulated,
        allreduce=allreduce,
        halves=tuple(table.cost for table in tables if table.cost.kind != "allreduce"),
        link=link,
        link_in_node=link_in_node,
        calibrated_on="; ".join([*named, *dict.fromkeys(measured_on)]),
        source="dpsim calibrate --from " + "; ".join(made_by),
    )
    return machine, tuple(tables)


def read(path: Path, format: Format | None, devices: int | None, out_of_place: bool) -> Contents:
    """Return what a file holds, read as ``format`` or as what it looks like. Raises ``FileFormatError``."""
    source = read_source(path)
    name = format or _format(source)
    if name in TABLE_FORMATS:
        return TABLE_FORMATS[name].read(source)
    if nccl_report.recognises(source):
        return nccl_report.read(source, out_of_place)
    if not nccl_text.recognises(source) and (other := others.refusal(source)):
        raise other
    return nccl.read(source, devices, out_of_place)


def _format(source: Source) -> str:
    matching = ["nccl-tests"] * (nccl_report.recognises(source) or nccl_text.recognises(source))
    matching += [name for name, form in TABLE_FORMATS.items() if form.recognises(source)]
    if not matching and (other := others.refusal(source)):
        raise other
    if len(matching) != 1:
        looks = f"like {' and like '.join(matching)}" if matching else "like no benchmark that can be imported"
        raise source.refuse(
            1,
            f"the file looks {looks}",
            allowed="the output of nccl-tests (text, or JSON of -J), OSU's osu_allreduce or IMB-MPI1 Allreduce",
            remedy="name the one to read with --format" if matching else "give the whole output, its title lines too",
        )
    return matching[0]


def _imported(
    file: str, contents: Contents, algorithm: str, devices: int | None, layout: Layout, *, keep_outliers: bool
) -> Iterator[Imported]:
    """Yield the tables of one file that ran on ``devices`` in ``layout``, as far as those are given.

    Tables of 1 device, which has nothing to reduce, are passed over where there are others.
    """
    said = [table.devices for table in contents.tables]
    chosen = [table for table in contents.tables if devices is None or table.devices in (None, devices)]
    chosen = [table for table in chosen if table.devices != 1] or chosen
    if not chosen:
        raise ConfigError(
            f"--devices {layout or devices}, and {file} was measured on {', '.join(map(str, said))} devices",
            allowed="the number that the file says",
            remedy="leave --devices out",
        )
    for table in chosen:
        count = _device_count(file, table, devices)
        of_nodes = layout if devices is not None else table.layout
        if layout and table.layout not in ("", layout):
            raise ConfigError(
                f"--devices {layout}, and {file} was measured on {table.layout} ({table.where})",
                allowed=f"{table.layout}, or {count} if the nodes do not matter",
                remedy="leave --devices out",
            )
        check(algorithm=algorithm, devices=count, layout=of_nodes)
        if table.kind != "allreduce":
            check(strategy="zero1", algorithm=algorithm)
        left_out = {} if keep_outliers else table.jumps
        try:
            cost = _cost(table, algorithm, count, of_nodes, left_out)
        except ConfigError as error:
            message = f"{file}, table of {table.where}: {error.given}"
            raise FileFormatError(message, allowed=error.allowed, remedy=error.remedy) from error
        done = "kept" if keep_outliers else "left out (dpsim calibrate --from with --keep-outliers keeps it)"
        yield Imported(
            file=file,
            benchmark=contents.benchmark,
            measured=table.measured,
            cost=cost,
            doubts=tuple(f"{file}, {jump}: {done}" for jump in table.jumps.values()),
            notes=tuple(f"{file}, {table.where}: {note}" for note in table.notes),
        )


def _cost(table: Table, algorithm: str, devices: int, layout: Layout, left_out: Container[int]) -> AllreduceCost:
    """Return a table's times, without those of the sizes that are left out. Raises ``ConfigError``."""
    points = [point for point in zip(table.sizes_bytes, table.time_s, strict=True) if point[0] not in left_out]
    return AllreduceCost(
        algorithm=algorithm,
        devices=devices,
        layout=layout,
        sizes_bytes=tuple(size for size, _ in points),
        time_s=tuple(time_s for _, time_s in points),
        wire_dtype=table.wire_dtype,
        kind=table.kind,
    )


def _device_count(file: str, table: Table, devices: int | None) -> int:
    """Return on how many devices a table was measured. Raises ``ConfigError`` if nobody says it, and for 1."""
    count = table.devices or devices
    if count is None:
        raise ConfigError(
            f"{file} does not say on how many devices it was measured ({table.where})",
            allowed="--devices N, or nodes x devices of a node like 2x4",
            remedy="give the number of ranks it ran on with --devices",
        )
    if count == 1:
        raise ConfigError(
            f"{file} was measured on 1 device ({table.where}), which has nothing to reduce",
            allowed="2 devices or more",
            remedy="measure on as many devices as you want to predict for; where mpirun started several processes,"
            " build nccl-tests with MPI=1: without it each measures alone",
        )
    return count


def _check_each_once(tables: Sequence[Imported]) -> None:
    file_of: dict[Collective, str] = {}
    for table in tables:
        collective = table.cost.collective
        if collective in file_of:
            files = dict.fromkeys((file_of[collective], table.file))
            raise ConfigError(
                f"two tables of {collective.kind} by {collective.algorithm} on"
                f" {collective.layout or collective.devices} devices in {' and '.join(files)}",
                allowed="one for each collective, algorithm and number of devices",
                remedy="give one of the two, or name their algorithms with --algorithm NAME,NAME",
            )
        file_of[collective] = table.file


def _one_each(values: Sequence[T], files: Sequence[str]) -> list[T]:
    return list(values) * (len(files) if len(values) == 1 else 1)
