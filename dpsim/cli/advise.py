"""``dpsim advise``: which strategy pays for a workload on a machine, from files alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.algorithms import ALGORITHMS
from dpsim.cli import flags, show
from dpsim.cli.predict import MachineFlags
from dpsim.errors import ConfigError
from dpsim.registry import listed

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model.advise import Advice

EXAMPLES = f"""\
Examples:
  dpsim advise --workload w.json --machine m.json --devices 8
  dpsim advise --workload w.json --machine m.json --devices 8
    --global-batch 256 --optimizer adamw --memory 16GiB
  dpsim advise --workload w.json --machine m.json --devices 2x4 --all
  dpsim advise --workload w.json --machine m.json --devices 2
    --measure --model mlp:64x20{flags.WORDS}"""
MEASURED = 3
"""How many of the best strategies are measured, beside plain data parallelism."""


class MeasureFlags(flags.Flags, of="model dataset"):
    """The flags of measuring what is advised."""

    measure: bool = flags.flag(
        "Also measure the three best that fit, and plain data parallelism, in turns on this machine. Needs --model.",
        default=False,
    )
    output: Path | None = flags.flag("Folder of the report of --measure [reports/advised, or the next that is free].")


class TrainingFlags(flags.Flags, of="global_batch fusion_rule algorithm batch_norm wire_dtype optimizer"):
    """The flags of what all plans have in common."""

    global_batch: int | None = flags.flag("Samples per step, over all devices (the largest profiled on each).")
    algorithm: str | None = flags.flag(f"One of {listed(ALGORITHMS)}.")


def advise(
    *,
    workload: Annotated[Path, Parameter(help="A workload file from dpsim profile.")],
    machine: Annotated[Path, Parameter(help="A machine file from dpsim calibrate.")],
    devices: Annotated[str, Parameter(help="Number of devices, or a layout: 2x4.")],
    training: TrainingFlags,
    leaves: flags.LeafFlags,
    stated: MachineFlags,
    measured: MeasureFlags,
    memory: Annotated[
        str | None, Parameter(help="Memory of a device, like 16GiB (the machine file's memory_bytes).")
    ] = None,
    every: Annotated[
        bool, Parameter(name="--all", negative="", show_default=False, help="Show every plan that is compared.")
    ] = False,
    json: flags.Json = False,
) -> None:
    """Rank strategies by their predicted step, and say which fit in memory; needs no MPI.

    Each strategy is priced with its settings, micro-batches, fusion thresholds
    and overlaps, at one global batch. The table shows the best of each.
    """
    import msgspec

    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.model.advise import advise
    from dpsim.model.cautions import cautions
    from dpsim.model.defaults import for_prediction
    from dpsim.optimizer import Sgd, changed
    from dpsim.report import advice as report
    from dpsim.report.words import interval_sentence
    from dpsim.setting import Grid

    if measured.measure and (json or "model" not in measured.values()):
        raise ConfigError(
            "--measure with --json" if json else "--measure without --model: a workload file is not what is trained",
            allowed="--measure with --model, and without --json",
            remedy="add --model, of the model that was profiled; the report of --measure has files for programs",
        )
    flags.writable(measured.output, folders=("sweep",))
    profiled, (number, layout) = workloads.read(workload), flags.layout(devices)
    known = for_prediction(profiled, stated.of(profiled, machines.read(machine), [number]), [number])
    if memory is not None:
        known = msgspec.structs.replace(known, memory_bytes=flags.memory(memory))
    fields = training.values() | leaves.values()
    if "optimizer" in fields:
        fields["optimizer"] = changed(Sgd(), fields["optimizer"], {})
    advice = advise(profiled, known, Grid.of(devices=layout or number, **fields), every=every)
    points, summary = report.records(advice, every=every), report.summary(advice, profiled)
    notes = [*advice.script.unpriced, *cautions(known, [row.plan for row in advice.choices], profiled)]
    if json:
        show.print_json("advise", points, summary | {"cautions": notes})
        return
    if sentence := report.nothing_fits(advice):
        print(sentence)
    batch = advice.plain.plan.global_batch
    show.table(report.columns(advice), points, title=f"{profiled.name} on {devices} devices, global batch {batch}")
    for sentence in report.sentences(advice, profiled):
        print(sentence)
    predicted = advice.choices[0].prediction
    interval = interval_sentence(predicted.interval_level, predicted.interval_studies)
    for sentence in [interval, *filter(None, [advice.script.sentence]), *notes]:
        print(f"Note: {sentence}.")
    if measured.measure:
        _measure(advice, known, measured)


def _measure(advice: Advice, machine: Machine, given: MeasureFlags) -> None:
    """Measure the best strategies that fit beside plain data parallelism, and print what came of it."""
    from dpsim.cli.sweep import run
    from dpsim.harness.sweep.experiment import experiment_of_plans

    fitting = [row.plan for row in advice.choices if row.memory.fits is not False]
    plans = list(dict.fromkeys([*fitting[:MEASURED], advice.plain.plan]))
    if len(plans) == 1:
        print("Nothing is measured: there is no plan to compare with plain data parallelism.")
        return
    waits = machine.emulated_network and max(plan.devices for plan in plans) > (machine.cores or math.inf)
    base = given.values() | {"network": machine.network} | ({"compute": "emulated"} if waits else {})
    run(experiment_of_plans("advised", plans, **base), given.output, command="advise")
