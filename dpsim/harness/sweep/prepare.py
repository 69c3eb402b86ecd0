"""What a prediction needs, measured in one job: the profile of a model, and a calibration of each network."""

from __future__ import annotations

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.data import load_dataset
from dpsim.data.sharding import largest_share
from dpsim.harness import models
from dpsim.harness.calibrate.calibrate import CalibrateConfig, machine
from dpsim.harness.measurement.environment import environment
from dpsim.harness.profile.profile import Profile, ProfileConfig
from dpsim.launch.jobs import on_ranks
from dpsim.layout import parse_devices
from dpsim.machine import Machine
from dpsim.optimizer import Optimizer
from dpsim.plan import Strategy
from dpsim.progress import Progress
from dpsim.records.sweep import Scaling
from dpsim.runtime.describe import describe
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

_MOST_S, _LEAST_S = 12.0, 2.0


class Preparation(Noun, frozen=True):
    """What will be run: one model at one global batch, on some devices or layouts, networks and algorithms.

    ``networks`` holds pairs (network, algorithm). Under weak ``scaling`` the batch is that of one device. Profile and
    calibrations take ``budget_s`` together, but no more than 12 s and no less than 2.
    """

    model: str
    dataset: str
    global_batch: int
    devices: tuple[int | str, ...]
    networks: tuple[tuple[str, str], ...]
    overlaps: tuple[str, ...]
    optimizer: Optimizer
    seed: int = 0
    wire_dtype: WireDtype | None = None
    scaling: Scaling = Scaling()
    budget_s: float = _MOST_S
    strategy: Strategy = "data-parallel"


def prepare(preparation: Preparation, progress: Progress) -> tuple[Workload, dict[str, Machine]]:
    """The profiled workload, and a calibrated machine for each network.

    The machines' compute slowdown is that of the model itself, measured at the local batches that will be run.
    """
    counts = [parse_devices(token)[0] for token in preparation.devices]
    most_devices = max(counts)
    scaling, batch = preparation.scaling, preparation.global_batch
    shares = {n: batch if scaling.kind == "weak" else largest_share(batch, n, scaling.leaves) for n in counts}
    seconds = min(max(preparation.budget_s, _LEAST_S), _MOST_S)
    profile_config = ProfileConfig(
        model=preparation.model,
        dataset=preparation.dataset,
        local_batches=tuple(sorted(set(shares.values()))),
        optimizer=preparation.optimizer,
        concurrent=tuple(shares.items()),
        seed=preparation.seed,
        leaves=scaling.leaves,
        batch_norm=scaling.mode,
    )
    dataset = load_dataset(preparation.dataset, preparation.seed)
    model = models.load(preparation.model, dataset.input_shape, dataset.classes).replica()
    size = describe(model, preparation.model).gradient_bytes
    calibrations = {
        network: codec.to_builtins(
            CalibrateConfig(
                network=network,
                devices=preparation.devices,
                algorithms=(algorithm,),
                overlaps=preparation.overlaps,
                model=preparation.model,
                dataset=preparation.dataset,
                local_batch=shares[most_devices],
                max_bytes=max(size, 1024),
                wire_dtype=preparation.wire_dtype,
                strategy=preparation.strategy,
            )
        )
        for network, algorithm in preparation.networks
    }
    results = on_ranks(
        "dpsim.harness.sweep.prepare_on_ranks:prepare_on_ranks",
        {"profile": codec.to_builtins(profile_config), "calibrations": calibrations, "seconds": seconds},
        devices=most_devices,
        progress=progress,
        pin=True,
    )
    profile = codec.decode(results["profile"], Profile, "profile")
    measured_in = environment()
    machines = {
        network: msgspec.structs.replace(
            machine(network, tables, most_devices, measured_in),
            compute_slowdown=profile.compute_slowdown,
            speed=profile.speed,
        )
        for network, tables in results["machines"].items()
    }
    return profile.workload, machines
