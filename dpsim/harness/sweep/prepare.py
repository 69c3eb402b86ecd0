"""What a prediction needs of a machine and a model, measured in one job: a profile, and a calibration a network."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dpsim import codec, models
from dpsim.codec import Noun
from dpsim.data import load_dataset
from dpsim.data.sharding import largest_share
from dpsim.harness.calibrate.calibrate import CalibrateConfig, machine
from dpsim.harness.measurement.environment import environment
from dpsim.harness.profile.profile import Profile, ProfileConfig
from dpsim.launch.jobs import on_ranks
from dpsim.layout import parse_devices
from dpsim.machine import Machine
from dpsim.optimizer import Optimizer
from dpsim.records.sweep import Scaling
from dpsim.runtime.describe import describe
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

Progress = Callable[[str], None]


_MOST_S, _LEAST_S = 12.0, 2.0


class Preparation(Noun, frozen=True):
    """What will be run: one model at one global batch on some devices or layouts and (network, algorithm) pairs.

    Under weak ``scaling`` it is the batch of one device. Profile and calibrations take ``budget_s`` together, no more
    than 12 s and no less than 2.
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


def prepare(preparation: Preparation, progress: Progress) -> tuple[Workload, dict[str, Machine]]:
    """The profiled workload, and a calibrated machine a network.

    The machines' compute slowdown is the model's own, measured at the local batches that will be run.
    """
    counts = [parse_devices(token)[0] for token in preparation.devices]
    most = max(counts)
    over, batch = preparation.scaling, preparation.global_batch
    shares = {n: batch if over.kind == "weak" else largest_share(batch, n, over.leaves) for n in counts}
    seconds = min(max(preparation.budget_s, _LEAST_S), _MOST_S)
    profiling = ProfileConfig(
        model=preparation.model,
        dataset=preparation.dataset,
        local_batches=tuple(sorted(set(shares.values()))),
        optimizer=preparation.optimizer,
        crowd=tuple(shares.items()),
        seed=preparation.seed,
        leaves=over.leaves,
        batch_norm=over.mode,
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
                local_batch=shares[most],
                max_bytes=max(size, 1024),
                wire_dtype=preparation.wire_dtype,
            )
        )
        for network, algorithm in preparation.networks
    }
    found = on_ranks(
        "dpsim.harness.sweep.prepare_on_ranks:prepare_on_ranks",
        {"profile": codec.to_builtins(profiling), "calibrations": calibrations, "seconds": seconds},
        devices=most,
        progress=progress,
        pin=True,
    )
    profile = codec.decode(found["profile"], Profile, "profile")
    here = environment()
    machines = {
        network: msgspec.structs.replace(
            machine(network, tables, most, here),
            compute_slowdown=profile.compute_slowdown,
            speed=profile.speed,
        )
        for network, tables in found["machines"].items()
    }
    return profile.workload, machines
