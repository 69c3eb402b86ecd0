"""``dpsim tune``: which bucket cap, local batch, accumulation and number of devices, and the line to paste."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, readers, show
from dpsim.errors import ConfigError
from dpsim.frameworks import FRAMEWORKS
from dpsim.registry import listed

if TYPE_CHECKING:
    from dpsim.frameworks import Framework
    from dpsim.harness.script.measure import ScriptStudy
    from dpsim.harness.script.tune import Profiled
    from dpsim.machine import Machine
    from dpsim.model.ranking import Tuned, Tuning
    from dpsim.plan import Plan
    from dpsim.progress import Progress
    from dpsim.records.comparison import Comparison
    from dpsim.workload import Workload

EXAMPLES = f"""\
Examples:
  dpsim tune --torch-script train.py --devices 2
  dpsim tune --torch-script train.py --devices 2 --measure -- --width 1024
  dpsim tune --torch-script train.py --machine cluster.json --devices 8..64
  dpsim tune --workload w.json --machine m.json --devices 2,4,8,16
    --framework horovod{flags.WORDS}"""
SHOWN = (
    "--torch-script --workload --machine --devices --framework --local-batch --global-batch --set "
    "--measure --budget --network --output --json"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""


class SourceFlags(flags.Flags, of="torch_script workload machine"):
    """The flags of what is tuned, and where."""

    torch_script: str | None = flags.flag(
        "Your own PyTorch script, or module as python -m takes it, which trains with DistributedDataParallel."
    )
    workload: Path | None = flags.flag("In place of a script: a workload file from dpsim profile.")
    machine: Path | None = flags.flag("A machine file (with a script: calibrated here if left out).")


class SettingFlags(flags.Flags, of="local_batch... global_batch", by_set="algorithm overlap strategy dataset seed"):
    """The flags of the plans that are compared."""

    framework: str = flags.flag(f"Whose buckets and default: {listed(FRAMEWORKS)}.", default="ddp")
    local_batch: str | None = flags.flag(
        "Local batches to compare, of a workload yours first (of a script: also twice and four times its own)."
    )
    global_batch: int | None = flags.flag("Samples per step over all devices, in place of local batches.")

    def of_plans(self) -> dict[str, Any]:
        """Return the fields of the plans; those that are left are of the measurement. Raises ``ConfigError``."""
        from dpsim.plan import Plan

        return {
            name: value for name, value in self.values().items() if name in ("local_batch", *Plan.__struct_fields__)
        }


class MeasureFlags(flags.Flags, of="measure budget model network script_may_write"):
    """The flags of measuring what is advised."""

    measure: bool = flags.flag("Also measure the best four and the default, in turns on this machine.", default=False)
    budget: str | None = flags.flag("Time to measure, like 60s (45s).")
    model: str | None = flags.flag("With --workload and --measure: the model that was profiled.")
    network: str | None = flags.flag("With a script: node, or an emulated link such as paced:200us,1gbit (node).")
    script_may_write: flags.ScriptMayWrite = None
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag("Folder of the records [reports/tune-NAME; of a model reports/tuned].")


def tune(
    *arguments: Annotated[str, Parameter(name="ARGUMENTS", help="Arguments of the script, after --.")],
    source: SourceFlags,
    devices: Annotated[str, Parameter(help="Numbers of devices: 2,4,8 or 8..1024 (doubling), or layouts: 2x4.")],
    given: SettingFlags,
    measured: MeasureFlags,
    json: flags.Json = False,
) -> None:
    """Say which bucket cap, batch, accumulation and devices to use, and the line to paste.

    A script is profiled and calibrated here, as dpsim sweep does; or files are
    given. Each gain over the default has the 90% interval of the difference.
    """
    from dpsim import workload as workloads
    from dpsim.report import tuning as report

    framework, counts = FRAMEWORKS.find(given.framework), readers.counts_or_layouts(devices)
    flags.writable(measured.output, folders=("sweep",))
    scripted = source.torch_script is not None
    here = scripted and source.machine is None
    _check(source, given, measured, arguments, here=here, json=json)
    with show.measuring(measured.wait_until_quiet) if scripted else show.progress() as progress:
        job = _Job.of(source, counts, arguments, given, measured, progress) if scripted else None
        if job is not None and here:
            tuning, workload, machine = job.tuned(progress)
        else:
            workload = job.profiled.workload if job else workloads.read(source.workload or Path())
            batches = job.profiled.batches if job else ()
            tuning, machine = _of_files(workload, source, counts, given, framework, batches)
    if json:
        show.print_json("tune", report.records(tuning), report.summary(tuning, framework, workload))
        return
    _print_tuning(tuning, workload, framework, decide=here and not measured.measure)
    for sentence in _notes(tuning, workload, machine, job):
        print(f"Note: {sentence}.")
    answer = report.answer(tuning.advised, framework, workload)
    if measured.measure:
        comparison = _compared(tuning.advised, machine, job, given, measured)
        answer = _print_measured(comparison, tuning.advised, workload, framework)
    print("\n".join(filter(None, answer)))


def _print_tuning(tuning: Tuning, workload: Workload, framework: Framework, *, decide: bool) -> None:
    """Print the tables and sentences of a tuning, with ``decide`` the command that would decide between equals."""
    from dpsim.report import tuning as report

    for tuned in dict.fromkeys((tuning.advised, tuning.tuned[-1])):
        plan, rows = tuned.default.plan, report.shown(tuned)
        title = f"{workload.name}, {framework.title} on {plan.layout or plan.devices} devices"
        show.table(report.columns(rows), rows, title=title)
    show.table(report.growth_columns(), report.growth_records(tuning))
    for sentence in report.sentences(tuning, decide="the same command with --measure" * decide):
        print(sentence)


def _compared(
    tuned: Tuned, machine: Machine, job: _Job | None, given: SettingFlags, measured: MeasureFlags
) -> Comparison:
    """Measure the best options and the default in turns. Raises ``ConfigError`` where there is no other option."""
    from dpsim.harness.sweep.scores import MEASURED

    samples = math.inf if job else _samples(given)
    accumulation = job is None or not job.profiled.cannot_accumulate
    options = tuned.to_measure(MEASURED, accumulation=accumulation, most_samples=samples)
    plans = [tuned.default.plan, *(option.plan for option in options)]
    if len(plans) == 1:
        raise ConfigError("nothing to measure: no other cap or batch than the default's", remedy="leave --measure out")
    return job.measured(plans) if job else _measured_model(plans, machine, given, measured)


def _print_measured(comparison: Comparison, tuned: Tuned, workload: Workload, framework: Framework) -> tuple[str, str]:
    """Print what was measured, and return the answer and the line to paste."""
    from dpsim.harness.sweep.scores import measured_regret
    from dpsim.report import tuning as report

    rows = report.measured_records(comparison, tuned)
    show.table(report.measured_columns(), rows, title="Measured in turns")
    if report.measured_point(comparison, tuned.advised.plan) is None:
        print("What is advised was left out of the measurement: raise the budget to measure it.")
    else:
        print(report.regret_sentence(measured_regret(comparison, tuned.caps, tuned.advised), rows))
    for sentence in report.measured_batches(rows):
        print(sentence)
    return report.measured_answer(rows, framework, workload)


def _check(
    source: SourceFlags,
    given: SettingFlags,
    measured: MeasureFlags,
    arguments: Sequence[str],
    *,
    here: bool,
    json: bool,
) -> None:
    """Raise ``ConfigError`` for flags that do not go together; ``here``: a script is calibrated on this machine."""
    files = source.workload is not None and source.machine is not None
    scripted = source.torch_script is not None
    unused = [given.spelled(name) for name in given.of_plans() if name != "local_batch"]
    wrong = None
    if scripted and source.workload is not None:
        wrong = "--workload and a script", "one of the two", ""
    elif not scripted and not files:
        allowed = "--torch-script train.py, or --workload w.json --machine m.json"
        wrong = "neither a script nor both --workload and --machine", allowed, ""
    elif not scripted and arguments:
        wrong = f"ARGUMENTS without a script: {' '.join(arguments)}", "", "leave them out"
    elif here and (unused or given.framework != "ddp"):
        names = ", ".join(unused or [f"--framework {given.framework}"])
        remedy = "leave it out, or give --machine with the times of the framework's allreduces"
        wrong = f"{names} with a script that is calibrated here, where DDP decides it", "DDP by its own library", remedy
    elif measured.wait_until_quiet is not None and not scripted and not measured.measure:
        wrong = "--wait-until-quiet with files alone, where nothing is measured", "", "leave it out, or add --measure"
    elif measured.measure and json:
        wrong = "--measure with --json", "", "leave --json out: the folder of --measure has files for programs"
    elif measured.measure and scripted and not here:
        wrong = "--measure with a script and --machine", "this machine, which is calibrated", "leave --machine out"
    elif measured.measure and not scripted and measured.model is None:
        wrong = "--measure without --model: a workload file is not what is trained", "", "add --model"
    if wrong is not None:
        raise ConfigError(wrong[0], allowed=wrong[1], remedy=wrong[2])


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A script to tune: its study, its profile, and the folder of its records."""

    study: ScriptStudy
    profiled: Profiled
    folder: Path

    @classmethod
    def of(
        cls,
        source: SourceFlags,
        counts: Sequence[int | str],
        arguments: tuple[str, ...],
        given: SettingFlags,
        measured: MeasureFlags,
        progress: Progress,
    ) -> _Job:
        """Profile the script that the flags name. Raises ``ConfigError``."""
        from dpsim.collective import parse_devices
        from dpsim.harness.script.experiment import script_experiment
        from dpsim.harness.script.measure import ScriptStudy
        from dpsim.harness.script.tune import profiled
        from dpsim.launch.user_program import is_module
        from dpsim.machine import NODE, Network

        script = source.torch_script or ""
        network = measured.network or NODE
        declared = script_experiment(
            script,
            arguments=arguments,
            devices=[parse_devices(count)[0] for count in counts],
            networks=(network,),
            communication=("mpi" if Network.parse(network).emulated else "gloo",),
            **{name: value for name, value in given.values().items() if name == "seed"},
            **readers.provided(budget_s=readers.budget(measured.budget)),
        )
        folder = measured.output or Path("reports") / f"tune-{script if is_module(script) else Path(script).stem}"
        flags.writable(folder, folders=("sweep",), inputs=(Path(script),))
        study = ScriptStudy(experiment=declared, script_may_write=bool(measured.script_may_write))
        batches = readers.listed("--local-batch", given.local_batch, readers.whole_numbers("--local-batch")) or ()
        python = sys.executable if source.machine is None else None  # that which is measured, or the job's own
        profiled_inputs = profiled(study, batches, progress, accumulates=measured.measure, python=python)
        return cls(study=study, profiled=profiled_inputs, folder=folder)

    def tuned(self, progress: Progress) -> tuple[Tuning, Workload, Machine]:
        from dpsim.harness.script.tune import tune_here

        return tune_here(self.study, self.profiled, self.folder, progress)

    def measured(self, plans: Sequence[Plan]) -> Comparison:
        from dpsim.harness.script.tune import measure_advised

        with show.progress() as progress:
            return measure_advised(self.study, self.profiled, plans, self.folder, progress)


def _of_files(
    workload: Workload,
    source: SourceFlags,
    counts: Sequence[int | str],
    given: SettingFlags,
    framework: Framework,
    batches: Sequence[int],
) -> tuple[Tuning, Machine]:
    """Tune a workload on the machine of a file, which is returned as it is used. Raises ``ConfigError``."""
    from dpsim import machine as machines
    from dpsim.collective import parse_devices
    from dpsim.model.defaults import for_prediction
    from dpsim.model.ranking import tune
    from dpsim.setting import Grid
    from dpsim.units import ITEM_BYTES

    machine = for_prediction(
        workload, machines.read(source.machine or ""), [parse_devices(count)[0] for count in counts]
    )
    grid = Grid.of(devices=counts, **given.of_plans())
    if batches and not grid.values("global_batch"):
        grid = grid.changed(local_batch=tuple(batches))
    if workload.ddp is None or framework.name != "ddp":
        grid = grid.changed(fusion_rule=framework.rule)
    if framework.default_numbers is not None:
        default_bytes = float(framework.default_numbers * ITEM_BYTES[workload.tensors[0].dtype])
        grid = grid.changed(fusion_threshold_bytes=default_bytes)
    return tune(workload, machine, grid), machine


def _samples(given: SettingFlags) -> int:
    """The samples of the data set on which a model is measured."""
    from dpsim.data import load_dataset
    from dpsim.records.sweep import Experiment

    values = given.values()
    return len(load_dataset(values.get("dataset", Experiment().dataset), 0).train_y)


def _measured_model(plans: Sequence[Plan], machine: Machine, given: SettingFlags, measured: MeasureFlags) -> Comparison:
    """Measure plans of a model of dpsim's own in turns."""
    from dpsim.cli.sweep import run
    from dpsim.harness.sweep.experiment import experiment_of_plans

    waits = machine.emulated_network and plans[0].devices > (machine.cores or math.inf)
    values = given.values() | measured.values()
    base = {name: value for name, value in values.items() if name in ("model", "dataset")}
    base |= {"network": machine.network} | ({"compute": "emulated"} if waits else {})
    experiment = experiment_of_plans("tuned", plans, **base)
    return run(experiment, measured.output, command="tune", wait=measured.wait_until_quiet)


def _notes(tuning: Tuning, workload: Workload, machine: Machine, job: _Job | None) -> list[str]:
    from dpsim.model.cautions import cautions

    plans = [option.plan for tuned in tuning.tuned for option in tuned.caps]
    refusal = job.profiled.refusal if job is not None else None
    notes = [f"no larger local batches were compared: {refusal.given}"] if refusal else []
    if job is not None and job.profiled.cannot_accumulate:
        notes.append(f"accumulation is predicted and not measured, since the script {job.profiled.cannot_accumulate}")
    return [
        *filter(None, [tuning.script.sentence]),
        *tuning.script.unpriced,
        *notes,
        *cautions(machine, plans, workload),
    ]
