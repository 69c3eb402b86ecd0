"""``dpsim sweep``: predict, measure, compare; over the fusion threshold, the devices, or any grid of settings."""

from __future__ import annotations

from collections.abc import Mapping
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

COMMANDS = ("fusion-threshold", "devices", "local-batch", "batch-norm")
Overlap = Annotated[
    str | None, Parameter(help="auto: measure the predicted-best mode; or all, off, inline, poll, thread.")
]
Scaling = Annotated[
    Literal["strong", "weak"] | None,
    Parameter(help="strong (the same global batch on all), or weak (the same local batch on all)."),
]


def group() -> App:
    """``dpsim sweep`` with its commands."""
    app = flags.group("sweep", "Predict, measure and compare over a range of settings.", EXAMPLES + flags.WORDS)
    app.usage = "Usage: dpsim sweep COMMAND\n       dpsim sweep FILE [OPTIONS]"
    flags.command(app, fusion_threshold, _THRESHOLD_EXAMPLES)
    flags.command(app, devices, _DEVICES_EXAMPLES)
    flags.command(app, local_batch, _LOCAL_BATCH_EXAMPLES)
    flags.command(app, batch_norm, _BATCH_NORM_EXAMPLES)
    flags.command(app, _of_file)
    return app


class SweepFlags(
    flags.Flags,
    of="model dataset devices... fusion_rule algorithm... network... compute seed wire_dtype compute_dtype",
):
    """The flags that every sweep has."""

    budget: str | None = flags.flag(
        "Time to spend on measuring, like 60s; up to 30s more, if 6 rounds of all settings need it: then 3 are "
        "measured, and fewer settings. Profile and calibration get as much as the budget, 2 to 12s for each "
        "computation, and twice that where the machine is not steady."
    )
    experiment: Path | None = flags.flag("A file (.toml) that declares an experiment; flags override it.")
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag("Folder of the report [reports/NAME, or the next that is free].")
    json: flags.Json = False
    verbose: flags.AllTables = False

    def declared(self, question: str) -> Experiment:
        """Return the experiment to change, of a file or dpsim's own, which has to ask this question."""
        from dpsim.harness.sweep import sweep
        from dpsim.harness.sweep.questions import check_question
        from dpsim.records.sweep import read_experiment

        flags.writable(self.output, folders=("sweep",), inputs=(self.experiment,))
        own = question.replace("-", "_")
        experiment = sweep.declared(own) if self.experiment is None else read_experiment(self.experiment)
        check_question(experiment, question)
        return experiment

    def run(self, experiment: Experiment, command: str) -> Comparison:
        """Run a sweep and print its result."""
        return run(
            experiment,
            self.output,
            json=self.json,
            verbose=self.verbose,
            command=command,
            wait=self.wait_until_quiet,
        )

    def changed(self, base: Experiment, values: dict[str, Any]) -> Experiment:
        """Return ``base`` with other values of its fields and its settings', and with its budget."""
        import msgspec

        from dpsim.setting import FIELDS

        if isinstance(values.get("fusion_threshold_bytes"), float):
            values["fusion_threshold_bytes"] = (values["fusion_threshold_bytes"],)
        of_settings = {name: value for name, value in values.items() if name in FIELDS}
        of_run = {name: value for name, value in values.items() if name not in FIELDS}
        of_run |= flags.provided(budget_s=flags.budget(self.budget))
        return msgspec.structs.replace(base.changed(**of_settings), **of_run)


class ThresholdFlags(SweepFlags, of="global_batch fusion_threshold_bytes... overlap"):
    """The flags of a sweep over the fusion threshold."""

    overlap: str | None = flags.flag(
        "auto: measure the predicted-best mode and one alternative; or all, off, inline, poll, thread."
    )


def fusion_threshold(*, given: ThresholdFlags) -> None:
    """Which fusion threshold makes a step fastest, and does the model predict it?

    Profiles the model and calibrates the network, and writes a prediction
    down. Then all settings are measured, in random order and in turns with
    more profiles and calibrations; from these they are predicted once more,
    which is scored. The page to open is index.html in the report's folder.
    """
    base = given.declared("fusion-threshold")
    given.run(given.changed(base, given.values()), "sweep fusion-threshold")


class DevicesFlags(SweepFlags, of="global_batch fusion_threshold_bytes overlap batch_norm"):
    """The flags of a sweep over the devices that set fields of its settings."""

    overlap: Overlap = None


def devices(
    *,
    given: DevicesFlags,
    leaves: flags.LeafFlags,
    scaling: Scaling = None,
    local_batch: Annotated[int | None, Parameter(help="Samples per step on each device, under weak scaling.")] = None,
    steps: Annotated[
        int | None, Parameter(help="Steps to train on each number of devices, to see the divergence (50).")
    ] = None,
) -> int:
    """How fast is training on more devices, and is it still the same training?

    Predicts and measures the step on each number of devices, interleaved,
    and then trains on each to see how far the parameters diverge from those on
    one device. Exits with 1 where bits that should be the same differ.
    """
    from dpsim.records.checks import check_steps

    base = given.declared("devices")
    values = given.values() | leaves.values()
    if "leaves" in values:
        values.setdefault("batch_norm", None)  # the default for this number of leaves
    values |= _strong_or_weak(base, scaling, local_batch, values.get("global_batch"))
    if steps is not None:
        check_steps(steps)
        values["steps"] = steps
    comparison = given.run(given.changed(base, values), "sweep devices")
    return 1 if comparison.identical is False else 0


class LocalBatchFlags(
    SweepFlags, of="local_batch... global_batch... scaling fusion_threshold_bytes overlap batch_norm"
):
    """The flags of a sweep over the local batch."""

    scaling: Scaling = None
    overlap: Overlap = None
    target_loss: float | None = flags.flag("Train to this loss on the training set too: how many steps, how much time?")


def local_batch(*, given: LocalBatchFlags) -> None:
    """How fast is training at each local batch, and when is a device busy?

    Profiles every other batch, predicts all of them, and measures them.
    Reports samples per second, speedup, exposed communication and memory, the
    batch from which a device is busy, and from which communication hides.
    """
    base = given.declared("local-batch")
    values = given.values() | flags.provided(target_loss=given.target_loss)
    given.run(given.changed(base, values | _batches(base, given.scaling, values)), "sweep local-batch")


class BatchNormFlags(SweepFlags, of="norms local_batch... global_batch... scaling overlap"):
    """The flags of a sweep over batch norm."""

    norms: str | None = flags.flag(
        "Norms to compare: batch norm's local, leaf, global; or none, group, instance, layer in its place.",
        name="--batch-norm",
    )
    scaling: Scaling = None
    overlap: str | None = flags.flag("auto: measure the predicted-best mode; or off, inline, poll, thread.")
    seeds: int | None = flags.flag(
        "Also train from so many seeds (10 or more; 0: train nothing): what do small batches do?"
    )
    epochs: int | None = flags.flag("Epochs of these trainings (8).")


def batch_norm(*, given: BatchNormFlags) -> None:
    """What does batch norm cost, with whose statistics, and what do other norms cost?

    Predicts and measures the step with each norm, at each local batch and on
    each number of devices, interleaved. With --seeds it also predicts and then
    measures how much worse training becomes with small local batches.
    """
    from msgspec.structs import replace

    from dpsim.harness.sweep.norms import norm_cases

    base = given.declared("batch-norm")
    values = given.values() | flags.provided(seeds=given.seeds, epochs=given.epochs)
    experiment = given.changed(base, values | _batches(base, given.scaling, values))
    norms = flags.listed("--batch-norm", given.norms, str)
    if norms is not None:
        cleared = experiment.changed(model=None, batch_norm=None, leaves=None)
        experiment = replace(cleared, cases=norm_cases(experiment, norms))
    given.run(experiment, "sweep batch-norm")


class FileFlags(SweepFlags, of="global_batch"):
    """The flags of a sweep that a file declares."""


def _of_file(
    file: Annotated[
        Path | None, Parameter(help="A file (.toml) that declares any grid of settings, as docs/grid.md explains.")
    ] = None,
    /,
    *,
    given: FileFlags,
) -> int:
    """Which of the settings in FILE trains fastest, and does the model predict it?

    Profiles the models and calibrates the networks, and writes a prediction
    down. Then all settings are measured, in random order and in turns with
    more of both, from which they are predicted once more; that is scored.
    """
    from dpsim.errors import ConfigError, unknown
    from dpsim.records.sweep import read_experiment

    if file is None:
        group().help_print([])
        return 0
    if not file.suffix and not file.exists():
        raise unknown("command", file, COMMANDS, remedy="or give a file that declares a sweep")
    if given.experiment is not None:
        raise ConfigError(
            f"two experiments, {file} and --experiment {given.experiment}",
            allowed="one",
            remedy="leave --experiment out",
        )
    flags.writable(given.output, folders=("sweep",), inputs=(file,))
    experiment = given.changed(read_experiment(file), given.values())
    comparison = given.run(experiment, "sweep")
    return 1 if comparison.identical is False else 0


def _strong_or_weak(
    base: Experiment, scaling: str | None, local_batch: int | None, global_batch: int | None
) -> dict[str, int | None]:
    """The global batch under strong scaling; under weak scaling the local batch, which --global-batch may give too.

    Raises ``ConfigError``.
    """
    from dpsim.errors import ConfigError

    weak = base.weak if scaling is None else scaling == "weak"
    if local_batch is not None and (not weak or global_batch is not None):
        conflict = f"and --global-batch {global_batch}" if weak else "under strong scaling"
        raise ConfigError(
            f"--local-batch {local_batch} {conflict}",
            allowed="--local-batch with --scaling weak, --global-batch without",
            remedy="give one of the two",
        )
    before = base.value("local_batch") or base.value("global_batch")
    batch = local_batch or global_batch or before
    return {"local_batch": batch, "global_batch": None} if weak else {"local_batch": None, "global_batch": batch}


def _batches(base: Experiment, scaling: str | None, given: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
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
    kept_as = "local" if scaling == "weak" else "global"
    values = local or whole or base.values(f"{kept_as}_batch")
    if not values:
        raise ConfigError(
            f"{scaling} scaling of an experiment without such batches", allowed=f"--{kept_as}-batch 16,32,64"
        )
    return {"local_batch": None, "global_batch": None} | {f"{kept_as}_batch": values}


def run(
    experiment: Experiment,
    output: Path | None,
    *,
    command: str,
    json: bool = False,
    verbose: bool = False,
    wait: str | None = None,
) -> Comparison:
    """Run a sweep and print its result. Without ``output`` its folder is the next that is free."""
    from dpsim.harness.sweep.sweep import free_folder, sweep
    from dpsim.report.sweep.content import for_terminal
    from dpsim.report.sweep.saved import points, summary
    from dpsim.report.sweep.summary import Summary

    folder = output if output is not None else free_folder(Path("reports"), experiment)
    with show.measuring(wait) as progress:
        swept = sweep(experiment, folder, progress)
    if json:
        show.print_json(command, points(swept), summary(swept))
    else:
        tables = [for_terminal(swept.comparison)] * verbose
        show.rich(*tables, Summary(comparison=swept.comparison, folder=folder))
    return swept.comparison
