"""``dpsim explain``: where the time of a training step goes, and what would make it shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import flags, job, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model.estimate import MeasuredStep
    from dpsim.model.explanation import Explanation
    from dpsim.workload import Workload

EXAMPLES = f"""\
Examples:
  dpsim explain -- torchrun --nproc-per-node 2 train.py --batch-size 64
  dpsim explain --torch-script train.py --devices 2 -- --batch-size 32
  dpsim explain --trace rank0.pt.trace.json.gz,rank1.pt.trace.json.gz
  dpsim explain --parameters 125000000 --measured 1:0.40s,16:0.61s
  dpsim explain --parameters 638000000 --local-batch 24
    --measured 1x8:240/s,2x8:160/s
  dpsim explain --workload w.json --network-log all_reduce_perf.txt
    --measured 1:0.40s,16:0.61s{flags.WORDS}"""
SHOWN = (
    "--torch-script --trace --devices --steps --network --json --measured --workload --parameters "
    "--machine --network-log --local-batch --global-batch"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""


class ScriptFlags(flags.Flags, of="torch_script network"):
    """The flags of a script whose ranks are observed."""

    torch_script: str | None = flags.flag(
        "Your own PyTorch script, or module as python -m takes it, which trains with DistributedDataParallel or "
        "fully_shard."
    )
    trace: str | None = flags.flag("Traces that PyTorch's profiler made of the ranks of a DDP training: FILE,FILE.")
    devices: int | None = flags.flag("With a script: ranks, all on this machine (2).")
    steps: int | None = flags.flag(
        "Training steps to observe, after the first ones (40); then a script is ended, and a job goes on."
        " With --measured, of whole trainings: the steps of each."
    )
    network: str | None = flags.flag(
        "With a script: node or shaped:2x1gbit, where DDP communicates by gloo, or paced:200us,1gbit (node)."
    )
    json_line: Path | None = flags.flag(
        "Of a job: the file for the answer as a line of JSON, beside the text on stderr."
    )
    script_may_write: flags.ScriptMayWrite = None
    wait_until_quiet: flags.WaitUntilQuiet = None


class StepFlags(
    flags.Flags,
    of="local_batch global_batch",
    by_set="accumulate fusion_rule fusion_threshold_bytes algorithm overlap strategy wire_dtype",
):
    """The flags of steps that somebody measured."""

    measured: str | None = flags.flag(
        "Steps on two numbers of devices or more: 1:0.40s,16:0.61s, or of all samples a second: 1x8:240/s,2x8:160/s; or"
        " whole trainings: 1:80h,4:150h with --steps or --samples."
    )
    samples: str | None = flags.flag("With --measured, of whole trainings: the samples that each trained, like 1.28M.")
    workload: Path | None = flags.flag("With --measured: a workload file of the model.")
    parameters: str | None = flags.flag("With --measured, in place of --workload: how many numbers a gradient has.")
    machine: Path | None = flags.flag("With --measured: a machine file that says what collectives cost.")
    network_log: str | None = flags.flag(
        "With --measured, in place of --machine: logs of nccl-tests, OSU or IMB: FILE,FILE."
    )
    local_batch: int | None = flags.flag("Samples of a step on each device, the same on all numbers of devices (1).")
    global_batch: int | None = flags.flag("Samples of a step on all devices, the same on all numbers of devices.")
    json: flags.Json = False


def explain(
    *arguments: Annotated[
        str,
        Parameter(
            name="ARGUMENTS",
            help="Arguments of the script, after --; or without a script the command of a job, which is started.",
        ),
    ],
    script: ScriptFlags,
    of: StepFlags,
) -> int:
    """Say where each millisecond of a training step goes, its cause first, and what each remedy would gain.

    The parts add up to the measured step. What nothing explains is one of
    them.

    With a command and without other flags than --steps and --json-line, a job
    of your own with DDP or fully_shard is started, and trains to its end as it
    would without dpsim. Its exit code is that of the command. What is
    said goes to stderr.
    """
    sources = readers.provided(torch_script=script.torch_script, trace=script.trace, measured=of.measured)
    if not sources and arguments:
        _refuse((script, of), ("steps", "json_line"), "a command and no script")
        return job.explain(arguments, job.STEPS if script.steps is None else script.steps, json_line=script.json_line)
    if len(sources) != 1:
        allowed = "one of --torch-script, --trace and --measured, or a command after --"
        raise ConfigError(" and ".join(map(flags.flag_of, sources)) or "nothing to explain", allowed=allowed)
    (source,) = sources
    unused = {"torch_script": (of,), "measured": (script,), "trace": (script, of)}
    used = (source, "json", "steps") if source == "measured" else (source, "json")
    _refuse(unused[source], used, flags.flag_of(source))
    if script.json_line is not None:
        raise ConfigError("--json-line without the command of a job", allowed="--json", remedy="type --json")
    if of.measured is not None:
        explained = _steps(of, of.measured, script.steps)
    elif script.trace is not None:
        explained = _traces(script.trace)
    else:
        explained = _script(script, arguments)
    _print(explained, json=of.json)
    return 0


def _print(explained: Explanation, *, json: bool) -> None:
    from dpsim import codec
    from dpsim.report import explain as report

    if json:
        points = [codec.to_builtins(part) for part in explained.parts]
        show.print_json("explain", points, codec.to_builtins(report.summary(explained)))
        return
    print(report.cause(explained))
    title = f"{explained.name} on {explained.devices}, by {explained.method}"
    show.table(report.columns(explained), explained.parts, title=title)
    for line in [*report.details(explained), *report.remedies(explained)]:
        print(line)
    for note in explained.notes:
        print(f"Note: {note}.")


def _refuse(given: Sequence[flags.Flags], used: tuple[str, ...], source: str) -> None:
    """Raise ``ConfigError`` for flags that the source of the explanation has no use for."""
    if unused := [each.spelled(name) for each in given for name in each.given() if name not in used]:
        raise ConfigError(f"{', '.join(unused)} with {source}", remedy="leave it out: it would change nothing")


def _script(of: ScriptFlags, arguments: tuple[str, ...]) -> Explanation:
    from dpsim.harness.explain.script import ScriptToExplain, explain_script
    from dpsim.launch.job_python import OWN, job_python
    from dpsim.machine import Network

    options = readers.provided(
        devices=of.devices, steps=of.steps, network=of.network, script_may_write=of.script_may_write
    )
    script = ScriptToExplain(script=of.torch_script or "", arguments=arguments, **options)
    script = replace(script, by=OWN if Network.parse(script.network).paced else job_python())
    script.by.tell(Path(script.script).name)
    with show.measuring(of.wait_until_quiet) as progress:
        return explain_script(script, progress)


def _traces(traces: str) -> Explanation:
    from dpsim.harness.explain.traces import explain_traces

    return explain_traces(readers.listed("--trace", traces, Path) or ())


def _steps(of: StepFlags, measured: str, steps: int | None) -> Explanation:
    from dpsim.model.two_steps import ANY_LINK, explain_steps

    machine = _machine(of)
    rows = _rows(of, measured, steps, machine or ANY_LINK)
    return explain_steps(_workload(of), machine, rows)


def _rows(of: StepFlags, measured: str, steps: int | None, machine: Machine) -> list[MeasuredStep]:
    """Return the steps of ``--measured``: of whole trainings, one of each. Raises ``ConfigError``."""
    from dpsim.cli.hours import samples_of
    from dpsim.imports.steps import measured_steps, steps_of_trainings

    batches = readers.provided(local_batch=of.local_batch, global_batch=of.global_batch)
    samples = None if of.samples is None else samples_of(of.samples)
    batch = batches or {"local_batch": 1}
    if len(batches) > 1:
        raise ConfigError("--local-batch with --global-batch", allowed="one of the two")
    rows = []
    for part in readers.listed("--measured", measured, str) or ():
        devices, colon, value = part.partition(":")
        rate = value.removesuffix("/s")
        if not (devices and colon and value):
            raise ConfigError(
                f"--measured is {part!r}",
                allowed="devices and a step, 16:0.61s, or devices and samples a second, 2x8:160/s",
                remedy="write --measured 1:0.40s,16:0.61s",
            )
        if rate != value and not batches:
            raise ConfigError(
                f"--measured {part} without a batch",
                allowed="--local-batch or --global-batch with samples a second",
                remedy="give the samples of a step: --local-batch 32",
            )
        if rate != value and (steps or samples):
            raise ConfigError(
                f"--measured {part} with --steps or --samples",
                allowed="times of whole trainings with these, like 4:150h",
                remedy="leave them out: a rate says it all",
            )
        step = {"images_per_s": rate} if rate != value else {"step_s": value}
        rows.append((f"--measured {part}", {"devices": devices} | batch | step))
    others = {name: value for name, value in of.values().items() if name not in ("local_batch", "global_batch")}
    measured_rows = measured_steps(rows, machine, **({"fusion_rule": "ddp"} | others))
    return steps_of_trainings(measured_rows, steps, samples, batch_known=bool(batches))


def _machine(of: StepFlags) -> Machine | None:
    from dpsim import machine as machines
    from dpsim.imports import ImportConfig, import_machine

    if of.machine is not None and of.network_log is not None:
        raise ConfigError("--machine with --network-log", allowed="one of the two")
    if of.network_log is not None:
        files = readers.listed("--network-log", of.network_log, str) or ()
        machine, tables = import_machine(ImportConfig(files=files))
        show.doubts(tables)
        return machine
    return None if of.machine is None else machines.read(of.machine)


def _workload(of: StepFlags) -> Workload:
    from dpsim import workload as workloads
    from dpsim.model.two_steps import layers_of
    from dpsim.units import ITEM_BYTES

    if (of.workload is None) == (of.parameters is None):
        given = "neither --workload nor --parameters" if of.workload is None else "--workload with --parameters"
        raise ConfigError(given, allowed="one of the two", remedy="--parameters 125000000 is enough")
    if of.workload is not None:
        return workloads.read(of.workload)
    parameters = readers.whole_numbers("--parameters")(of.parameters or "")
    return layers_of(parameters * ITEM_BYTES["float32"])
