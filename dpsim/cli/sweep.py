"""``dpsim sweep``: predict, measure, compare; over the fusion threshold, the devices, or any grid of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dpsim.cli import flags
from dpsim.cli.sweep_flags import Overlap, Scaling, SweepFlags, batches, declared, run, strong_or_weak

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


class ThresholdFlags(SweepFlags, of="global_batch fusion_threshold_bytes... overlap"):
    """The flags of a sweep over the fusion threshold."""

    overlap: str | None = flags.flag(
        "auto: measure the predicted-best mode and one alternative; or all, off, inline, poll, thread."
    )


_THRESHOLD = ThresholdFlags.absent()


def fusion_threshold(*, given: ThresholdFlags = _THRESHOLD) -> None:
    """Which fusion threshold makes a step fastest, and does the model predict it?

    Profiles the model and calibrates the network, writes its predictions down,
    and only then measures all settings, interleaved and in random order. The
    page to open is index.html in the folder of the report.
    """
    from dpsim.harness.sweep.questions import check_question

    flags.writable(given.output, folder=True)
    base = declared("fusion_threshold", given.experiment)
    check_question(base, "fusion-threshold")
    run(given.changed(base, given.values()), given, command="sweep fusion-threshold")


class DevicesFlags(SweepFlags, of="global_batch fusion_threshold_bytes overlap batch_norm"):
    """The flags of a sweep over the devices that set fields of its settings."""

    overlap: Overlap = None


_DEVICES, _LEAVES = DevicesFlags.absent(), flags.LeafFlags.absent()


def devices(
    *,
    given: DevicesFlags = _DEVICES,
    leaves: flags.LeafFlags = _LEAVES,
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
    from dpsim.records.checks import check_steps

    flags.writable(given.output, folder=True)
    base = declared("devices", given.experiment)
    check_question(base, "devices")
    values = given.values() | leaves.values()
    if "leaves" in values:
        values.setdefault("batch_norm", None)  # the default for this number of leaves
    values |= strong_or_weak(base, scaling, local_batch, values.get("global_batch"))
    experiment = given.changed(base, values)
    if steps is not None:
        check_steps(steps)
        experiment = msgspec.structs.replace(experiment, steps=steps)
    comparison = run(experiment, given, command="sweep devices")
    return 1 if comparison.identical is False else 0


class LocalBatchFlags(
    SweepFlags, of="local_batch... global_batch... scaling fusion_threshold_bytes overlap batch_norm"
):
    """The flags of a sweep over the local batch."""

    scaling: Scaling = None
    overlap: Overlap = None
    target_loss: float | None = flags.flag("Train to this loss on the training set too: how many steps, how much time?")


_LOCAL_BATCH = LocalBatchFlags.absent()


def local_batch(*, given: LocalBatchFlags = _LOCAL_BATCH) -> None:
    """How fast is training at each local batch, and when is a device busy?

    Profiles every other batch, predicts all of them, and only then measures.
    Reports samples per second, speedup, exposed communication and memory, the
    batch from which a device is busy, and from which communication hides.
    """
    import msgspec

    from dpsim.harness.sweep.questions import check_question

    flags.writable(given.output, folder=True)
    base = declared("local_batch", given.experiment)
    check_question(base, "local-batch")
    values = given.values()
    experiment = given.changed(base, values | batches(base, given.scaling, values))
    experiment = msgspec.structs.replace(experiment, **flags.provided(target_loss=given.target_loss))
    run(experiment, given, command="sweep local-batch")


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


_BATCH_NORM = BatchNormFlags.absent()


def batch_norm(*, given: BatchNormFlags = _BATCH_NORM) -> None:
    """What does batch norm cost, with whose statistics, and what do other norms cost?

    Predicts, then measures the step with each norm, at each local batch and on
    each number of devices, interleaved. With --seeds it also predicts and then
    measures how much worse training becomes with small local batches.
    """
    import msgspec

    from dpsim.harness.sweep.norms import norm_cases
    from dpsim.harness.sweep.questions import check_question

    flags.writable(given.output, folder=True)
    base = declared("batch_norm", given.experiment)
    check_question(base, "batch-norm")
    values = given.values()
    experiment = given.changed(base, values | batches(base, given.scaling, values))
    norms = flags.listed("--batch-norm", given.norms, str)
    if norms is not None:
        cases = norm_cases(experiment, norms)
        cleared = experiment.changed(model=None, batch_norm=None, leaves=None)
        experiment = msgspec.structs.replace(experiment, **(cleared | {"cases": cases}))
    experiment = msgspec.structs.replace(experiment, **flags.provided(seeds=given.seeds, epochs=given.epochs))
    run(experiment, given, command="sweep batch-norm")


class FileFlags(SweepFlags, of="global_batch"):
    """The flags of a sweep that a file declares."""


_FILE = FileFlags.absent()


def _of_file(
    file: Annotated[
        Path | None, Parameter(help="A file (.toml) that declares any grid of settings, as docs/grid.md explains.")
    ] = None,
    /,
    *,
    given: FileFlags = _FILE,
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
    if given.experiment is not None:
        raise ConfigError(
            f"two experiments, {file} and --experiment {given.experiment}",
            allowed="one",
            remedy="leave --experiment out",
        )
    flags.writable(given.output, folder=True, inputs=(file,))
    experiment = given.changed(read_experiment(file), given.values())
    comparison = run(experiment, given, command="sweep")
    return 1 if comparison.identical is False else 0
