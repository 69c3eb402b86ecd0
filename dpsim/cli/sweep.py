"""``dpsim sweep``: predict, measure, compare; over the fusion threshold, the devices, or any grid of settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.comparison import Comparison
    from dpsim.records.sweep import Experiment

EXAMPLES = """\
Examples:
  dpsim sweep fusion-threshold
  dpsim sweep fusion-threshold --devices 1,2 --network node,paced:50us,1gbit
  dpsim sweep fusion-threshold --fusion-threshold 0,32KiB,inf --output mine
  dpsim sweep devices --model cnn --devices 1,2 --batch-norm local
  dpsim sweep local-batch --devices 1,2 --local-batch 8,16,32,64
  dpsim sweep batch-norm --batch-norm local,global,group --local-batch 16
  dpsim sweep ring-or-halving.toml --budget 60s"""
_THRESHOLD_EXAMPLES = """\
Examples:
  dpsim sweep fusion-threshold
  dpsim sweep fusion-threshold --network node,paced:50us,1gbit
  dpsim sweep fusion-threshold --model cnn --global-batch 64 --output reports/cnn"""
_DEVICES_EXAMPLES = """\
Examples:
  dpsim sweep devices --model cnn --devices 1,2 --global-batch 128
  dpsim sweep devices --batch-norm global --network node,paced:50us,1gbit
  dpsim sweep devices --reproducible --steps 100 --output reports/same-bits
  dpsim sweep devices --scaling weak --local-batch 64
  dpsim sweep devices --compute emulated --devices 1,2,4,8 --network paced:1ms,200mbit --fusion-threshold inf"""

_LOCAL_BATCH_EXAMPLES = """\
Examples:
  dpsim sweep local-batch --model cnn --devices 1,2 --local-batch 4,16,64,256
  dpsim sweep local-batch --scaling strong --global-batch 64,128,256,512
  dpsim sweep local-batch --network node,paced:50us,1gbit --budget 90s"""
_BATCH_NORM_EXAMPLES = """\
Examples:
  dpsim sweep batch-norm --model resnet20 --devices 1,2 --local-batch 32
  dpsim sweep batch-norm --batch-norm local,leaf,global,none,group,instance
  dpsim sweep batch-norm --network paced:200us,1gbit --local-batch 8,32"""


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
    budget: Annotated[
        str | None,
        Parameter(help="Time to spend on measuring, like 60s; calibration gets as much, at most 12s."),
    ] = None
    experiment: Annotated[
        Path | None, Parameter(help="A file (.toml) that declares an experiment; flags override it.")
    ] = None
    output: Annotated[Path | None, Parameter(help="Folder of the report [reports/NAME, or the next that is free].")] = (
        None
    )
    json: flags.Json = False

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
        )
        of_run = flags.provided(dataset=self.dataset, seed=self.seed, budget_s=flags.budget(self.budget))
        return msgspec.structs.replace(base, **base.changed(**(of_settings | values)), **of_run)


_DEFAULTS = SweepFlags()
COMMANDS = ("fusion-threshold", "devices", "local-batch", "batch-norm")
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


def group() -> App:
    """``dpsim sweep`` with its commands."""
    app = flags.group("sweep", "Predict, then measure, then compare over a range of settings.", EXAMPLES)
    app.usage = "Usage: dpsim sweep COMMAND\n       dpsim sweep FILE [OPTIONS]"
    app.command(fusion_threshold, help_epilogue=_THRESHOLD_EXAMPLES)
    app.command(devices, help_epilogue=_DEVICES_EXAMPLES)
    app.command(local_batch, help_epilogue=_LOCAL_BATCH_EXAMPLES)
    app.command(batch_norm, help_epilogue=_BATCH_NORM_EXAMPLES)
    app.default(_of_file)
    return app


def fusion_threshold(
    *,
    common: SweepFlags = _DEFAULTS,
    global_batch: flags.GlobalBatch = None,
    fusion_threshold: flags.Thresholds = None,
    overlap: Annotated[
        str | None,
        Parameter(help="auto: measure the predicted-best mode and one alternative; or all, off, inline, poll, thread."),
    ] = None,
) -> None:
    """Which fusion threshold makes a step fastest, and does the model predict it?

    Profiles the model and calibrates the network, writes its predictions down,
    and only then measures all settings, interleaved and in random order. The
    page to open is index.html in the folder of the report.
    """
    from dpsim.harness.sweep.questions import check_question

    flags.writable(common.output, folder=True)
    base = _declared("fusion_threshold", common.experiment)
    check_question(base, "fusion-threshold")
    thresholds = flags.listed("--fusion-threshold", fusion_threshold, flags.threshold)
    of_flags = flags.provided(global_batch=global_batch, fusion_threshold_bytes=thresholds, overlap=overlap)
    _sweep(common.changed(base, **of_flags), common, command="sweep fusion-threshold")


def devices(
    *,
    common: SweepFlags = _DEFAULTS,
    global_batch: flags.GlobalBatch = None,
    fusion_threshold: flags.Threshold = None,
    overlap: Overlap = None,
    batch_norm: flags.BatchNorm = None,
    reproducible: flags.Reproducible = None,
    leaves: flags.Leaves = None,
    scaling: Scaling = None,
    local_batch: Annotated[int | None, Parameter(help="Samples per step on each device, under weak scaling.")] = None,
    steps: Annotated[
        int | None, Parameter(help="Steps to train on each number of devices, to see the divergence (50).")
    ] = None,
) -> int:
    """How fast is training on more devices, and is it still the same training?

    Predicts, then measures the step on each number of devices, interleaved,
    and then trains on each to see how far the parameters diverge from those on
    one device. Exits with 1 where bits that should be the same differ.
    """
    import msgspec

    from dpsim.harness.sweep.questions import check_question
    from dpsim.plan import DEFAULT_LEAVES
    from dpsim.records.checks import check_steps

    flags.writable(common.output, folder=True)
    base = _declared("devices", common.experiment)
    check_question(base, "devices")
    flags.reproducible_leaves(reproducible, leaves)
    if reproducible and leaves is None:
        leaves = DEFAULT_LEAVES
    thresholds = None if fusion_threshold is None else (flags.threshold(fusion_threshold),)
    values = flags.provided(fusion_threshold_bytes=thresholds, overlap=overlap, batch_norm=batch_norm, leaves=leaves)
    if leaves is not None and batch_norm is None:
        values["batch_norm"] = None  # the default for this number of leaves
    values |= _batch(base, scaling, local_batch, global_batch)
    experiment = common.changed(base, **values)
    if steps is not None:
        check_steps(steps)
        experiment = msgspec.structs.replace(experiment, steps=steps)
    comparison = _sweep(experiment, common, command="sweep devices")
    return 1 if comparison.identical is False else 0


def local_batch(
    *,
    common: SweepFlags = _DEFAULTS,
    local_batch: flags.LocalBatches = None,
    global_batch: flags.GlobalBatches = None,
    scaling: Scaling = None,
    fusion_threshold: flags.Threshold = None,
    overlap: Overlap = None,
    batch_norm: flags.BatchNorm = None,
    target_loss: Annotated[
        float | None, Parameter(help="Train to this loss on the training set too: how many steps, how much time?")
    ] = None,
) -> None:
    """How fast is training at each local batch, and when is a device busy?

    Profiles every other batch, predicts all of them, and only then measures.
    Reports samples per second, speedup, exposed communication and memory, the
    batch from which a device is busy, and from which communication hides.
    """
    import msgspec

    from dpsim.harness.sweep.questions import check_question

    flags.writable(common.output, folder=True)
    base = _declared("local_batch", common.experiment)
    check_question(base, "local-batch")
    values = flags.provided(
        fusion_threshold_bytes=None if fusion_threshold is None else (flags.threshold(fusion_threshold),),
        overlap=overlap,
        batch_norm=batch_norm,
    )
    values |= _batches(base, scaling, local_batch, global_batch)
    experiment = common.changed(base, **values)
    experiment = msgspec.structs.replace(experiment, **flags.provided(target_loss=target_loss))
    _sweep(experiment, common, command="sweep local-batch")


def batch_norm(
    *,
    common: SweepFlags = _DEFAULTS,
    batch_norm: flags.Norms = None,
    local_batch: flags.LocalBatches = None,
    global_batch: flags.GlobalBatches = None,
    scaling: Scaling = None,
    overlap: OneOverlap = None,
    seeds: Annotated[
        int | None, Parameter(help="Also train from so many seeds (10 or more): what do small batches do to the loss?")
    ] = None,
    epochs: Annotated[int | None, Parameter(help="Epochs of these trainings (8).")] = None,
) -> None:
    """What does batch norm cost, by whose statistics and what is in its place?

    Predicts, then measures the step with each norm, at each local batch and on
    each number of devices, interleaved. With --seeds it also predicts and then
    measures how much worse training becomes with small local batches.
    """
    import msgspec

    from dpsim.harness.sweep.norms import norm_cases
    from dpsim.harness.sweep.questions import check_question

    flags.writable(common.output, folder=True)
    base = _declared("batch_norm", common.experiment)
    check_question(base, "batch-norm")
    values = flags.provided(overlap=overlap) | _batches(base, scaling, local_batch, global_batch)
    experiment = common.changed(base, **values)
    norms = flags.listed("--batch-norm", batch_norm, str)
    if norms is not None:
        cases = norm_cases(experiment, norms)
        cleared = experiment.changed(model=None, batch_norm=None, leaves=None)
        experiment = msgspec.structs.replace(experiment, **(cleared | {"cases": cases}))
    experiment = msgspec.structs.replace(experiment, **flags.provided(seeds=seeds, epochs=epochs))
    _sweep(experiment, common, command="sweep batch-norm")


def _of_file(
    file: Annotated[
        Path | None, Parameter(help="A file (.toml) that declares any grid of settings, as docs/grid.md explains.")
    ] = None,
    /,
    *,
    common: SweepFlags = _DEFAULTS,
    global_batch: flags.GlobalBatch = None,
) -> int:
    """Which of the settings in FILE trains fastest, and does the model predict it?

    Profiles the models and calibrates the networks, writes its predictions
    down, and only then measures all settings, interleaved and in random order.
    """
    from dpsim.errors import ConfigError, unknown
    from dpsim.records.sweep import read_experiment

    if file is None:
        group().help_print([])
        return 0
    if not file.suffix and not file.exists():
        raise unknown("command", file, COMMANDS, remedy="or give a file that declares a sweep")
    if common.experiment is not None:
        raise ConfigError(
            f"two experiments, {file} and --experiment {common.experiment}",
            allowed="one",
            remedy="leave --experiment out",
        )
    flags.writable(common.output, folder=True, inputs=(file,))
    experiment = common.changed(read_experiment(file), **flags.provided(global_batch=global_batch))
    comparison = _sweep(experiment, common, command="sweep")
    return 1 if comparison.identical is False else 0


def _batch(
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


def _batches(
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


def _declared(name: str, file: Path | None) -> Experiment:
    """The experiment that ``file`` declares; without a file, dpsim's own experiment ``name``."""
    from dpsim.harness.sweep.sweep import declared
    from dpsim.records.sweep import read_experiment

    return declared(name) if file is None else read_experiment(file)


def _sweep(experiment: Experiment, common: SweepFlags, *, command: str) -> Comparison:
    """Run a sweep and print its result."""
    from dpsim.harness.sweep.sweep import free_folder, sweep
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.result import points_json, summary_json

    folder = common.output if common.output is not None else free_folder(Path("reports"), experiment)
    with show.progress() as progress:
        comparison = sweep(experiment, folder, progress)
    if common.json:
        show.print_json(command, points_json(comparison), summary_json(comparison))
    else:
        show.rich(for_terminal(comparison))
        print(f"report: {folder / 'index.html'}")
    return comparison
