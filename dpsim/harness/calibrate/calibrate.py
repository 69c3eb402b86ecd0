"""``calibrate``: measures what collectives cost on this machine, alone and while it computes."""

from __future__ import annotations

from typing import Any

import psutil

from dpsim import codec
from dpsim.codec import Noun
from dpsim.compute_dtype import ComputeDtype
from dpsim.constraints import check, possible
from dpsim.errors import ConfigError, unknown
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.launch.jobs import on_ranks
from dpsim.layout import parse_devices
from dpsim.machine import (
    AllreduceCost,
    ComputeSlowdown,
    Machine,
    Network,
    OverlapCost,
    Selection,
    check_algorithm,
)
from dpsim.plan import STRATEGIES, Strategy
from dpsim.predict.link_fit import fitted_link
from dpsim.progress import Progress
from dpsim.records.sweep import Environment
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

MECHANISMS = ("poll", "thread")


class CalibrateConfig(Noun, frozen=True):
    """What to calibrate: a network on some device counts or layouts, by some algorithms and overlap mechanisms.

    Sizes go up to ``max_bytes``. The measuring takes ``seconds``, and up to twice as long until compute slowdowns are
    known to 3 %. Allreduces are also measured while the ranks compute: forward and backward of ``model`` (with its
    ``dataset`` and ``local_batch``), or a stand-in without a model. With a ``workload`` the model's computation is
    emulated, and ranks sleep while they wait. Data are float32, sent as ``wire_dtype``; ``compute_dtype`` is that of
    the model's operands. With ``strategy`` zero1 the reduce-scatters and all-gathers are measured beside the
    allreduces, where an algorithm has them. With ``sums`` ordered sums are measured too, as global batch norm needs
    them.
    """

    network: str = "node"
    devices: tuple[int | str, ...] = (2,)
    algorithms: tuple[str, ...] = ("auto",)
    overlaps: tuple[str, ...] = ("poll", "thread")
    max_bytes: int = 4 * 2**20
    seconds: float = 4.0
    model: str = ""
    dataset: str = "digits"
    local_batch: int = 0
    wire_dtype: WireDtype | None = None
    compute_dtype: ComputeDtype = "float32"
    strategy: Strategy = "data-parallel"
    sums: bool = False
    workload: Workload | None = None

    def __post_init__(self) -> None:
        network = Network.parse(self.network)
        for what in ("devices", "algorithms", "overlaps"):
            values = getattr(self, what)
            if len(set(values)) != len(values):
                raise ConfigError(f"{what} is {list(values)}", allowed="different values")
        for algorithm in self.algorithms:
            check_algorithm(algorithm, network)
            check(algorithm=algorithm, wire_dtype=self.wire_dtype, leaves=0)
            for devices, layout in self.layouts():
                check(algorithm=algorithm, devices=devices, layout=layout)
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)
        if not any(possible("strategy", strategy=self.strategy, algorithm=name) for name in self.algorithms):
            check(strategy=self.strategy, algorithm=self.algorithms[0])
        for overlap in self.overlaps:
            if overlap not in MECHANISMS:
                raise unknown("overlap mechanism", overlap, MECHANISMS)
        if self.model and self.local_batch < 1:
            raise ConfigError(
                f"calibrating beside {self.model!r} at local batch {self.local_batch}",
                allowed="a local batch of 1 or more",
            )
        if not 0 < self.seconds < 3600:
            raise ConfigError(f"seconds is {self.seconds}", allowed="more than 0, below 3600")
        if not 4 <= self.max_bytes <= 2**33:
            raise ConfigError(f"max_bytes is {self.max_bytes}", allowed="4 bytes to 8 GiB")

    def layouts(self) -> list[tuple[int, str]]:
        """(devices, layout) of each of ``devices`` above 1, fewest devices first."""
        return sorted(pair for pair in map(parse_devices, self.devices) if pair[0] > 1)


def calibrate(config: CalibrateConfig, progress: Progress) -> Machine:
    """Calibrate a network on as many ranks as the largest device count, and return the machine.

    Raises ``ConfigError`` for an unknown network or algorithm, ``CommunicationError`` where ranks fail.
    """
    if not config.layouts():
        raise ConfigError(f"calibrating devices {list(config.devices)}", allowed="at least one count above 1")
    ranks = config.layouts()[-1][0]
    tables = on_ranks(
        "dpsim.harness.calibrate.on_ranks:calibrate_on_ranks",
        dict(codec.to_builtins(config)),
        devices=ranks,
        progress=progress,
        pin=True,
    )
    return machine(config.network, tables, ranks, environment())


def machine(network: str, tables: dict[str, Any], ranks: int, measured_in: Environment) -> Machine:
    """The machine that the ranks' tables describe, measured in the environment ``measured_in``.

    Its link is fitted to the tables (``fitted_link``) and prices, as an extrapolation, what they do not cover.
    """
    allreduce = tuple(codec.decode(t, AllreduceCost, "calibration") for t in tables["allreduce"])
    link = Network.parse(network)
    return Machine(
        name=f"{measured_in.processor}, {measured_in.cores} cores",
        network=network,
        emulated_network=link.emulated,
        allreduce=allreduce,
        halves=tuple(codec.decode(t, AllreduceCost, "calibration") for t in tables["halves"]),
        link=fitted_link(allreduce, emulated=link.emulated, wire_latency_s=link.wire_latency_s),
        overlap=tuple(codec.decode(t, OverlapCost, "calibration") for t in tables["overlap"]),
        compute_slowdown=tuple(codec.decode(t, ComputeSlowdown, "calibration") for t in tables["compute_slowdown"]),
        selection=tuple(codec.decode(t, Selection, "calibration") for t in tables["selection"]),
        relative_uncertainty=tables["relative_uncertainty"],
        memory_bytes=psutil.virtual_memory().total / ranks,
        cores=measured_in.cores,
        calibrated_on=f"{measured_in.processor}, {network}, {stamp()}",
        source="dpsim calibrate",
    )
