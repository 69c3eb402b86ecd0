"""``dpsim tune``: which bucket cap, local batch, accumulation and number of devices, and the line to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import flags, ledger, readers, show
from dpsim.cli.script_sweep import DEFAULT
from dpsim.errors import ConfigError
from dpsim.frameworks import FRAMEWORKS
from dpsim.registry import listed

if TYPE_CHECKING:
    from dpsim.frameworks import Framework
    from dpsim.harness.script.measure import ScriptStudy
    from dpsim.harness.script.tune import Profiled
    from dpsim.machine import Machine
    from dpsim.model.ranking import Tuned, Tuning
    from dpsim.progress import Progress
    from dpsim.workload import Workload

EXAMPLES = f"""\
Examples:
  dpsim tune --torch-script train.py --devices 2
  dpsim tune --torch-script train.py --devices 2 -- --width 1024
  dpsim tune --torch-script train.py --machine cluster.json --devices 8..64
  dpsim tune --workload w.json --machine m.json --devices 2,4,8,16
    --framework horovod{flags.WORDS}"""


class SourceFlags(flags.Flags, of="torch_script workload machine"):
    """The flags of what is tuned, and where."""

    torch_script: str | None = flags.flag(
        "Your own PyTorch script, or module as python -m takes it, which trains with DistributedDataParallel."
    )
    workload: Path | None = flags.flag("In place of a script: a workload file from dpsim profile.")
    machine: Path | None = flags.flag("A machine file (with a script: calibrated here if left out).")


class SettingFlags(flags.Flags, of="local_batch... global_batch", by_set="algorithm overlap strategy"):
    """The flags of the plans that are compared."""

    framework: str = flags.flag(f"Whose buckets and default: {listed(FRAMEWORKS)}.", default="ddp")
    local_batch: str | None = flags.flag(
        "Local batches to compare, of a workload yours first (of a script: also twice and four times its own)."
    )
    global_batch: int | None = flags.flag("Samples per step over all devices, in place of local batches.")


class RunFlags(flags.Flags, of="network script_may_write"):
    """The flags of profiling and calibrating a script."""

    network: str | None = flags.flag("With a script: node, or an emulated link such as paced:200us,1gbit (node).")
    script_may_write: flags.ScriptMayWrite = None
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag("Folder of the records of a script [reports/tune-NAME].")


def tune(
    *arguments: Annotated[str, Parameter(name="ARGUMENTS", help="Arguments of the script, after --.")],
    source: SourceFlags,
    devices: Annotated[str, Parameter(help="Numbers of devices: 2,4,8 or 8..1024 (doubling), or layouts: 2x4.")],
    given: SettingFlags,
    of_run: RunFlags,
    json: flags.Json = False,
) -> None:
    """Say which bucket cap, batch, accumulation and devices to use, and the line to paste.

    A script is profiled and calibrated here, as dpsim sweep does; or files are
    given. Each gain over the default has the 90% interval of the difference.
    Of a script that is calibrated here the last line is the dpsim sweep that
    measures the fastest and the default in turns.
    """
    from dpsim import workload as workloads
    from dpsim.report import tuning as report

    framework, counts = FRAMEWORKS.find(given.framework), readers.counts_or_layouts(devices)
    flags.writable(of_run.output, folders=("sweep",))
    scripted = source.torch_script is not None
    here = scripted and source.machine is None
    _check(source, given, of_run, arguments, here=here)
    with show.measuring(of_run.wait_until_quiet) if scripted else show.progress() as progress:
        job = _Job.of(source, counts, arguments, given, of_run, progress) if scripted else None
        if job is not None and here:
            tuning, workload, machine = job.tuned(progress)
        else:
            workload = job.profiled.workload if job else workloads.read(source.workload or Path())
            batches = job.profiled.batches if job else ()
            tuning, machine = _of_files(workload, source, counts, given, framework, batches)
    rows = [row for t in tuning.tuned for row in (t.default, *t.caps, *t.batches, *t.accumulations)]
    ledger.keep("tune", {row.plan: row for row in rows}.values(), {"workload": workload, "machine": machine})
    sweep = job.sweep(tuning.advised) if job and here else ""
    if json:
        summary = report.summary(tuning, framework, workload) | {"sweep": sweep}
        show.print_json("tune", report.records(tuning), summary)
        return
    _print_tuning(tuning, workload, framework)
    for sentence in _notes(tuning, workload, machine, job):
        print(f"Note: {sentence}.")
    print("\n".join(filter(None, report.answer(tuning.advised, framework, workload))))
    if sweep:
        print(f"To measure the fastest and the default in turns:\n{sweep}")


def _print_tuning(tuning: Tuning, workload: Workload, framework: Framework) -> None:
    """Print the tables and sentences of a tuning."""
    from dpsim.report import tuning as report

    for tuned in dict.fromkeys((tuning.advised, tuning.tuned[-1])):
        plan, rows = tuned.default.plan, report.shown(tuned)
        title = f"{workload.name}, {framework.title} on {plan.layout or plan.devices} devices"
        show.table(report.columns(rows), rows, title=title)
    show.table(report.growth_columns(), report.growth_records(tuning))
    for sentence in report.sentences(tuning):
        print(sentence)


def _check(source: SourceFlags, given: SettingFlags, of_run: RunFlags, arguments: Sequence[str], *, here: bool) -> None:
    """Raise ``ConfigError`` for flags that do not go together; ``here``: a script is calibrated on this machine."""
    files = source.workload is not None and source.machine is not None
    scripted = source.torch_script is not None
    unused = [given.spelled(name) for name in given.values() if name != "local_batch"]
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
    elif of_run.wait_until_quiet is not None and not scripted:
        wrong = "--wait-until-quiet with files alone, where nothing is measured", "", "leave it out"
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
        of_run: RunFlags,
        progress: Progress,
    ) -> _Job:
        """Profile the script that the flags name. Raises ``ConfigError``."""
        from dpsim.collective import parse_devices
        from dpsim.harness.script.experiment import script_experiment
        from dpsim.harness.script.measure import ScriptStudy
        from dpsim.harness.script.tune import profiled
        from dpsim.launch.job_python import OWN, job_python
        from dpsim.launch.user_program import is_module
        from dpsim.machine import NODE, Network

        script = source.torch_script or ""
        network = of_run.network or NODE
        declared = script_experiment(
            script,
            arguments=arguments,
            devices=[parse_devices(count)[0] for count in counts],
            networks=(network,),
            communication=("mpi" if Network.parse(network).paced else "gloo",),
        )
        folder = of_run.output or Path("reports") / f"tune-{script if is_module(script) else Path(script).stem}"
        flags.writable(folder, folders=("sweep",), inputs=(Path(script),))
        by = OWN if Network.parse(network).paced else job_python()
        study = ScriptStudy(experiment=declared, script_may_write=bool(of_run.script_may_write), by=by)
        batches = readers.listed("--local-batch", given.local_batch, readers.whole_numbers("--local-batch")) or ()
        by.tell(study.request.name)
        return cls(study=study, profiled=profiled(study, batches, progress), folder=folder)

    def tuned(self, progress: Progress) -> tuple[Tuning, Workload, Machine]:
        from dpsim.harness.script.tune import tune_here

        return tune_here(self.study, self.profiled, self.folder, progress)

    def sweep(self, tuned: Tuned) -> str:
        """Return the ``dpsim sweep`` that measures what is fastest and the default; empty where there is nothing else.

        The fastest cap is measured, and where it is certainly faster, the fastest batch; if none is, accumulation.
        """
        default, experiment = tuned.default.plan, self.study.experiment
        caps = [_typed(option.plan.threshold_bytes) for option in tuned.caps if option is not tuned.default]
        batch, accumulation = tuned.batches[0], tuned.accumulations[0]
        more = []
        if batch.gain.certain:
            more = ["--local-batch", f"{default.local_batch:g},{batch.plan.local_batch:g}"]
        elif accumulation.gain.certain and not self.profiled.cannot_accumulate:
            more = ["--accumulate", f"{default.accumulate},{accumulation.plan.accumulate}"]
        if not caps and not more:
            return ""
        (case,) = experiment.cases
        words = ["dpsim", "sweep", "--torch-script", experiment.script, "--devices", str(default.devices)]
        words += ["--fusion-threshold", ",".join([DEFAULT, *caps[:1]]), *more]
        words += ["--network", case["network"], "--algorithm", case["runtime"].removeprefix("torch-ddp-")]
        words += ["--script-may-write"] * self.study.script_may_write
        return shlex.join([*words, *(["--", *experiment.arguments] if experiment.arguments else [])])


def _typed(size_bytes: float) -> str:
    """Return a size as one types it, exactly."""
    from dpsim.units import format_size, parse_size

    text = format_size(size_bytes).replace(" ", "")
    return text if parse_size(text) == size_bytes else f"{size_bytes:.0f}"


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
    from dpsim.model.defaults import for_prediction
    from dpsim.model.ranking import tune
    from dpsim.setting import Grid
    from dpsim.units import ITEM_BYTES

    machine = for_prediction(workload, machines.read(source.machine or ""))
    grid = Grid.of(devices=counts, **given.values())
    if batches and not grid.values("global_batch"):
        grid = grid.changed(local_batch=tuple(batches))
    if workload.ddp is None or framework.name != "ddp":
        grid = grid.changed(fusion_rule=framework.rule)
    if framework.default_numbers is not None:
        default_bytes = float(framework.default_numbers * ITEM_BYTES[workload.tensors[0].dtype])
        grid = grid.changed(fusion_threshold_bytes=default_bytes)
    return tune(workload, machine, grid), machine


def _notes(tuning: Tuning, workload: Workload, machine: Machine, job: _Job | None) -> list[str]:
    from dpsim.model.cautions import cautions

    plans = [option.plan for tuned in tuning.tuned for option in tuned.caps]
    refusal = job.profiled.refusal if job is not None else None
    notes = [f"no larger local batches were compared: {refusal.given}"] if refusal else []
    if job is not None and job.profiled.cannot_accumulate:
        notes.append(f"accumulation is predicted, and cannot be measured: the script {job.profiled.cannot_accumulate}")
    return [
        *filter(None, [tuning.script.sentence]),
        *tuning.script.unpriced,
        *notes,
        *cautions(machine, plans, workload),
    ]
