"""``dpsim profile --from-steps``: workload and machine files whose few free numbers are fitted to measured steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.cli import flags, outputs, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model.estimate import Estimated, FreeNumber
    from dpsim.workload import Workload

_ASSUMED_LATENCY_S = 20e-6


class StepFlags(flags.Flags, group="Fit what a model's shapes leave open to measured steps"):
    """The flags of what was measured, and of what is fitted."""

    from_steps: list[str] | None = flags.flag(
        "Measured steps, CSV with a header or TOML with [[rows]], or one step like "
        "devices=8,local_batch=32,images_per_s=1400; may be repeated. Writes a workload and a machine file.",
        negative="",
    )
    workload: Path | None = flags.flag(
        "With --from-steps: a workload file, in place of a model; its layer times keep their proportions."
    )
    machine: Path | None = flags.flag(
        "With --from-steps: a machine file whose other numbers hold; without it a link joins the devices."
    )
    free: str | None = flags.flag(
        "List of the numbers to fit: compute,bandwidth,latency,overhead,contention,loss (compute,bandwidth)."
    )


def fit(
    of: StepFlags,
    common: Mapping[str, Any],
    workload: Callable[[], Workload],
    folder: Path,
    inputs: Sequence[Path],
    *,
    json: bool,
) -> None:
    """Fit the free numbers to the steps, and write the workload and the machine; ``inputs`` are not written over.

    ``common`` are the fields of a plan that hold for the steps that do not state them. Every fitted number has its
    uncertainty. Numbers that the rows do not tell are refused.
    """
    import msgspec

    from dpsim import codec
    from dpsim.fields import assigned
    from dpsim.imports.steps import FIELDS, measured_steps, read_rows
    from dpsim.model.estimate import DEFAULT_FREE, FREE, free_names
    from dpsim.model.estimate import estimate as fitted

    texts = [(text, "=" in text and not Path(text).exists()) for text in of.from_steps or ()]
    files = [Path(text) for text, is_row in texts if not is_row]
    flags.writable(folder, folders=("estimate",), inputs=(*inputs, of.machine, *files))
    free = free_names(readers.listed("--free", of.free, str) or DEFAULT_FREE)
    machine = _machine(of.machine, free)
    rows = [row for file in files for row in read_rows(file)]
    rows += [(f"--from-steps {text}", assigned([text], "--from-steps", FIELDS)) for text, is_row in texts if is_row]
    steps = measured_steps(rows, machine, **common)
    estimated = fitted(workload(), machine, steps, free)
    names = ", ".join(number.name for number in estimated.numbers)
    source = f"{outputs.FITTED}{names} fitted to {len(steps)} rows"
    paths = {"workload": folder / "workload.json", "machine": folder / "machine.json"}
    folder.mkdir(parents=True, exist_ok=True)
    for path, noun in zip(paths.values(), (estimated.workload, estimated.machine), strict=True):
        codec.write(path, msgspec.structs.replace(noun, source=source))
    if json:
        points = [
            {"devices": step.plan.devices, "layout": step.plan.layout or str(step.plan.devices)}
            | {"local_batch": step.plan.local_batch, "measured_step_s": step.step_s}
            | {"predicted_step_s": step.step_s * (1 + error), "error": error}
            for step, error in zip(steps, estimated.errors, strict=True)
        ]
        numbers = [{**number._asdict(), "unit": FREE[number.name].unit} for number in estimated.numbers]
        show.print_json("estimate", points, {"numbers": numbers} | {name: str(path) for name, path in paths.items()})
        return
    for sentence in _sentences(estimated, FREE):
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
    if found.loses_less:
        sentences.append("Note: several devices lose less than is assumed, so nothing is taken to be lost.")
    lost = ("compute_slowdown", "loss_growth") if found.loses_less else ()
    assumed = [field for field in machine.assumed if field not in ("interval_widths", *lost)]
    sentences += [f"Note: {field} is assumed, as dpsim predict does for published machines." for field in assumed]
    return sentences
