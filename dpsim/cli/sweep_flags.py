"""The flags that sweeps share, and what every sweep does with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.comparison import Comparison
    from dpsim.records.sweep import Experiment


class SweepFlags(
    flags.Flags,
    of="model dataset devices... fusion_rule algorithm... network... compute seed wire_dtype compute_dtype",
):
    """The flags that every sweep has."""

    budget: str | None = flags.flag(
        "Time to spend on measuring, like 60s; 6 rounds are measured in any case. Profile and calibration "
        "get as much, 2 to 12s for each computation, and twice that where the machine is not steady."
    )
    experiment: Path | None = flags.flag("A file (.toml) that declares an experiment; flags override it.")
    output: Path | None = flags.flag("Folder of the report [reports/NAME, or the next that is free].")
    json: flags.Json = False
    verbose: flags.AllTables = False

    def changed(self, base: Experiment, values: dict[str, Any]) -> Experiment:
        """Return ``base`` with other values of its fields and its settings', and with its budget."""
        import msgspec

        from dpsim.setting import FIELDS

        if isinstance(values.get("fusion_threshold_bytes"), float):
            values["fusion_threshold_bytes"] = (values["fusion_threshold_bytes"],)
        of_settings = {name: value for name, value in values.items() if name in FIELDS}
        of_run = {name: value for name, value in values.items() if name not in FIELDS}
        of_run |= flags.provided(budget_s=flags.budget(self.budget))
        return msgspec.structs.replace(base, **base.changed(**of_settings), **of_run)


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


def batches(base: Experiment, scaling: str | None, given: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The local batches under weak scaling, the global ones under strong scaling. Raises ``ConfigError``."""
    from dpsim.errors import ConfigError

    local, whole = given.get("local_batch"), given.get("global_batch")
    if scaling is None:
        scaling = "weak" if local or (base.weak and not whole) else "strong"
    if (local and whole) or (local and scaling == "strong") or (whole and scaling == "weak"):
        names = " and ".join(name for name, there in (("--local-batch", local), ("--global-batch", whole)) if there)
        raise ConfigError(
            f"{names} under {scaling} scaling",
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
