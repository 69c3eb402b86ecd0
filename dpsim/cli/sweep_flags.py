"""The flags that sweeps share, and what every sweep does with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.comparison import Comparison
    from dpsim.records.sweep import Experiment


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """The flags that every sweep has."""

    model: flags.Model = None
    dataset: flags.DataSet = None
    devices: flags.DevicesList = None
    fusion_rule: flags.FusionRule = None
    algorithm: flags.Algorithms = None
    network: flags.Networks = None
    compute: flags.Compute = None
    seed: flags.Seed = None
    wire_dtype: flags.WireDtype = None
    compute_dtype: flags.ComputeDtype = None
    budget: Annotated[
        str | None,
        Parameter(
            help="Time to spend on measuring, like 60s; 6 rounds are measured in any case. Profile and calibration "
            "get as much, 2 to 12s for each computation, and twice that where the machine is not steady."
        ),
    ] = None
    experiment: Annotated[
        Path | None, Parameter(help="A file (.toml) that declares an experiment; flags override it.")
    ] = None
    output: Annotated[Path | None, Parameter(help="Folder of the report [reports/NAME, or the next that is free].")] = (
        None
    )
    json: flags.Json = False
    verbose: flags.AllTables = False

    def changed(self, base: Experiment, **values: Any) -> Experiment:
        """``base`` with these flags, and with other ``values`` of its settings. Raises ``ConfigError``."""
        import msgspec

        of_settings = flags.provided(
            model=self.model,
            devices=flags.listed("--devices", self.devices, flags.devices_or_layout),
            fusion_rule=self.fusion_rule,
            algorithm=flags.listed("--algorithm", self.algorithm, str),
            network=flags.networks(self.network),
            compute=self.compute,
            wire_dtype=self.wire_dtype,
            compute_dtype=self.compute_dtype,
        )
        of_run = flags.provided(dataset=self.dataset, seed=self.seed, budget_s=flags.budget(self.budget))
        return msgspec.structs.replace(base, **base.changed(**(of_settings | values)), **of_run)


DEFAULTS = SweepFlags()
OneOverlap = Annotated[
    str | None, Parameter(name="--overlap", help="auto: measure the predicted-best mode; or off, inline, poll, thread.")
]
Overlap = Annotated[
    str | None, Parameter(help="auto: measure the predicted-best mode; or all, off, inline, poll, thread.")
]
Scaling = Annotated[
    Literal["strong", "weak"] | None,
    Parameter(help="strong (the same global batch on all), or weak (the same local batch on all)."),
]


def strong_or_weak(
    base: Experiment, scaling: str | None, local_batch: int | None, global_batch: int | None
) -> dict[str, int | None]:
    """The global batch under strong scaling; under weak scaling the local batch, which --global-batch may give too.

    Raises ``ConfigError``.
    """
    from dpsim.errors import ConfigError

    weak = base.weak if scaling is None else scaling == "weak"
    if local_batch is not None and (not weak or global_batch is not None):
        conflict = "under strong scaling" if not weak else f"and --global-batch {global_batch}"
        raise ConfigError(
            f"--local-batch {local_batch} {conflict}",
            allowed="--local-batch with --scaling weak, --global-batch without",
            remedy="give one of the two",
        )
    before = base.value("local_batch") or base.value("global_batch")
    batch = local_batch or global_batch or before
    return {"local_batch": batch, "global_batch": None} if weak else {"local_batch": None, "global_batch": batch}


def batches(
    base: Experiment, scaling: str | None, local_batches: str | None, global_batches: str | None
) -> dict[str, tuple[int, ...] | None]:
    """The local batches under weak scaling, the global ones under strong scaling. Raises ``ConfigError``."""
    from dpsim.errors import ConfigError

    local = flags.listed("--local-batch", local_batches, flags.whole("--local-batch"))
    whole = flags.listed("--global-batch", global_batches, flags.whole("--global-batch"))
    if scaling is None:
        scaling = "weak" if local or (base.weak and not whole) else "strong"
    if (local and whole) or (local and scaling == "strong") or (whole and scaling == "weak"):
        given = " and ".join(name for name, there in (("--local-batch", local), ("--global-batch", whole)) if there)
        raise ConfigError(
            f"{given} under {scaling} scaling",
            allowed="--local-batch under weak scaling, --global-batch under strong scaling",
            remedy="give one of the two, or leave --scaling out",
        )
    kept = base.values("local_batch" if scaling == "weak" else "global_batch")
    values = local or whole or kept
    if not values:
        raise ConfigError(
            f"{scaling} scaling of an experiment without such batches",
            allowed=f"--{'local' if scaling == 'weak' else 'global'}-batch 16,32,64",
        )
    return {
        "local_batch": values if scaling == "weak" else None,
        "global_batch": values if scaling == "strong" else None,
    }


def declared(name: str, file: Path | None) -> Experiment:
    """The experiment that ``file`` declares; without a file, dpsim's own experiment ``name``."""
    from dpsim.harness.sweep import sweep
    from dpsim.records.sweep import read_experiment

    return sweep.declared(name) if file is None else read_experiment(file)


def run(experiment: Experiment, common: SweepFlags, *, command: str) -> Comparison:
    """Run a sweep and print its result."""
    from dpsim.harness.sweep.sweep import free_folder, sweep
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.result import points_json, summary_json
    from dpsim.report.sweep.summary import Summary

    folder = common.output if common.output is not None else free_folder(Path("reports"), experiment)
    with show.progress() as progress:
        comparison = sweep(experiment, folder, progress)
    if common.json:
        show.print_json(command, points_json(comparison), summary_json(comparison))
    else:
        show.rich(*[for_terminal(comparison)] * common.verbose, Summary(comparison=comparison, folder=folder))
    return comparison
