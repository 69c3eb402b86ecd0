"""``dpsim estimate``: workload and machine files whose few free numbers are fitted to measured steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.cli import flags, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model.estimate import Estimated, FreeNumber
    from dpsim.workload import Workload

EXAMPLES = f"""\
Examples:
  dpsim estimate --workload resnet50.toml --rows published.csv
  dpsim estimate --model cnn --row devices=1,local_batch=32,step_s=20ms
    --row devices=8,local_batch=32,images_per_s=9000
  dpsim estimate --workload w.json --machine nccl.json
    --rows log.csv --free compute,contention,loss --output fitted{flags.WORDS}"""
_ASSUMED_LATENCY_S = 20e-6


class EstimateFlags(
    flags.Flags, of="model dataset fusion_rule fusion_threshold_bytes algorithm overlap accumulate wire_dtype"
):
    """The flags of what is trained, of what was measured, and of what is fitted."""

    workload: Path | None = flags.flag("A workload file, in place of --model; its layer times keep their proportions.")
    torch_script: Path | None = flags.flag("Take the workload from your own PyTorch script, in place of --model.")
    machine: Path | None = flags.flag("A machine file whose other numbers hold; without it a link joins the devices.")
    rows: Path | None = flags.flag("File of measured steps: CSV with a header, or TOML with [[rows]].")
    row: list[str] | None = flags.flag(
        "A measured step, like devices=8,local_batch=32,images_per_s=1400; may be repeated.", negative=""
    )
    free: str | None = flags.flag(
        "List of the numbers to fit: compute,bandwidth,latency,overhead,contention,loss (compute,bandwidth)."
    )
    output: Path = flags.flag("Folder for workload.json and machine.json.", default=Path("estimated"))
    json: flags.Json = False


def estimate(*, of: EstimateFlags) -> None:
    """Fit what a model's shapes leave open to measured steps; writes a workload and a machine file.

    Every fitted number has its uncertainty. Numbers that the rows do not tell
    are refused.
    """
    import msgspec

    from dpsim import codec
    from dpsim.imports.steps import measured_steps, parse_row, read_rows
    from dpsim.model.estimate import DEFAULT_FREE, FREE, free_names
    from dpsim.model.estimate import estimate as fitted

    flags.writable(of.output, folders=("estimate",), inputs=(of.workload, of.machine, of.rows, of.torch_script))
    free = free_names(flags.listed("--free", of.free, str) or DEFAULT_FREE)
    common = {name: value for name, value in of.values().items() if name not in ("model", "dataset")}
    machine = _machine(of.machine, free)
    rows = [] if of.rows is None else read_rows(of.rows)
    rows += [(f"--row {text}", parse_row(text)) for text in of.row or ()]
    if not rows:
        raise ConfigError("no measured steps", allowed="--rows FILE, or --row devices=8,local_batch=32,step_s=20ms")
    steps = measured_steps(rows, machine, **common)
    workload = _workload(of)
    found = fitted(workload, machine, steps, free)
    source = f"dpsim estimate: {', '.join(number.name for number in found.numbers)} fitted to {len(steps)} rows"
    paths = {"workload": of.output / "workload.json", "machine": of.output / "machine.json"}
    of.output.mkdir(parents=True, exist_ok=True)
    for path, noun in zip(paths.values(), (found.workload, found.machine), strict=True):
        codec.write(path, msgspec.structs.replace(noun, source=source))
    if of.json:
        points = [
            {"devices": step.plan.devices, "layout": step.plan.layout or str(step.plan.devices)}
            | {"local_batch": step.plan.local_batch, "measured_step_s": step.step_s}
            | {"predicted_step_s": step.step_s * (1 + error), "error": error}
            for step, error in zip(steps, found.errors, strict=True)
        ]
        numbers = [{**number._asdict(), "unit": FREE[number.name].unit} for number in found.numbers]
        show.print_json("estimate", points, {"numbers": numbers} | {name: str(path) for name, path in paths.items()})
        return
    for sentence in _sentences(found, FREE):
        print(sentence)
    print(f"workload file: {paths['workload']}\nmachine file: {paths['machine']}")


def _machine(path: Path | None, free: tuple[str, ...]) -> Machine:
    """Return the machine whose other numbers hold. Raises ``ConfigError`` where nothing prices a collective."""
    from dpsim import machine as machines
    from dpsim.machine import Link, Machine

    if path is not None:
        return machines.read(path)
    if "bandwidth" not in free:
        raise ConfigError(
            f"--free {','.join(free)} without --machine: nothing says what a collective costs",
            allowed="bandwidth among the free numbers, or a machine file",
            remedy="give --machine FILE, or add bandwidth to --free",
        )
    return Machine(name="estimated", link=Link(latency_s=_ASSUMED_LATENCY_S, bandwidth_bytes_per_s=1e9))


def _workload(of: EstimateFlags) -> Workload:
    """Return the workload that the flags name. Raises ``ConfigError``."""
    from dpsim import workload as workloads

    named = of.values()
    sources = flags.provided(model=named.get("model"), workload=of.workload, torch_script=of.torch_script)
    if len(sources) != 1:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
        raise ConfigError(given or "no workload", allowed="one of --model, --workload and --torch-script")
    if "dataset" in named and "model" not in named:
        raise ConfigError("--dataset without --model", remedy="leave --dataset out: the workload has its own shapes")
    if of.workload is not None:
        return workloads.read(of.workload)
    if of.torch_script is not None:
        from dpsim.torch_ddp.profile_script import profile_script
        from dpsim.torch_ddp.request import ScriptRequest

        return profile_script(ScriptRequest(script=str(of.torch_script), devices=8), ())
    from dpsim.study.profile import ProfileConfig, bare_workload

    return bare_workload(ProfileConfig(**flags.provided(model=named.get("model"), dataset=named.get("dataset"))))


def _sentences(found: Estimated, known: dict[str, FreeNumber]) -> list[str]:
    """Return what was fitted, how well, and what holds beside it."""
    import math
    from statistics import NormalDist, median

    from dpsim.report.words import counted
    from dpsim.units import format_bandwidth, format_duration

    formats = {"s": format_duration, "bytes/s": format_bandwidth, "ratio": "{:.3g}".format}
    deviations = NormalDist().inv_cdf(0.95)
    sentences = []
    for number in found.numbers:
        free, factor = known[number.name], math.exp(deviations * number.relative_uncertainty)
        value, low, high = (
            formats[free.unit](min(max(each, free.low), free.high))
            for each in (number.value, number.value / factor, number.value * factor)
        )
        end = "; it is at the end of its range" if number.at_bound else ""
        sentences.append(f"{number.name}: {value} (90 %: {low} to {high}), {free.text}{end}")
    errors = [abs(error) for error in found.errors]
    rows = f"{counted(len(errors), 'row')} {'is' if len(errors) == 1 else 'are'} missed by"
    sentences.append(f"{rows} {median(errors):.1%} in the median, {max(errors):.1%} at most.")
    machine, names = found.machine, {number.name for number in found.numbers}
    if machine.link is not None and not machine.allreduce and "latency" not in names:
        sentences.append(f"Note: a message's latency is taken to be {format_duration(machine.link.latency_s)}.")
    assumed = [field for field in machine.assumed if field != "interval_widths"]
    sentences += [f"Note: {field} is assumed, as dpsim predict does for published machines." for field in assumed]
    return sentences
