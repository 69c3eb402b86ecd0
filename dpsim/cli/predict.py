"""``dpsim predict``: step times from files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.algorithms import ALGORITHMS
from dpsim.cli import find, flags, outputs, rank, show
from dpsim.errors import ConfigError
from dpsim.registry import listed

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.records.convergence import Convergence
    from dpsim.workload import Workload

EXAMPLES = f"""\
Examples:
  dpsim predict --workload w.json --machine m.json --devices 2,4,8
    --global-batch 64 --fusion-threshold 0,32KiB,1MiB,inf
  dpsim predict --workload w.json --machine m.json --devices 8..100000
    --plot scaling.png
  dpsim predict --workload w.json --machine 10gbe,25gbe,mine.json --devices 8
  dpsim predict --workload w.json --machine 10gbe --devices 8
    --find bandwidth --efficiency 90%
  dpsim predict --workload w.json --machine m.json --devices 8
    --rank strategy --memory 16GiB --optimizer adamw
  dpsim predict --workload w.json --machine 25gbe --page meeting.html{flags.WORDS}"""
SHOWN = (
    "--workload --machine --devices --global-batch --local-batch --fusion-rule --fusion-threshold "
    "--algorithm --strategy --find --efficiency --rank --memory --page --json"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""


_HELP = "see dpsim predict --help"


class PlanFlags(
    flags.Flags,
    of="global_batch... local_batch... accumulate... fusion_rule... fusion_threshold_bytes... cycle_s algorithm..."
    " overlap batch_norm... wire_dtype strategy optimizer",
):
    """The flags of the plans that are predicted."""

    global_batch: str | None = flags.flag("Samples per step over all devices, one number or a list: strong scaling.")
    local_batch: str | None = flags.flag(
        "Samples that a device has at once, one number or a list: weak scaling (the largest profiled)."
    )
    accumulate: str | None = flags.flag("List of numbers of micro-batches a device and step (1, or the script's).")
    algorithm: str | None = flags.flag(f"List of {listed(ALGORITHMS)}.")
    batch_norm: str | None = flags.flag(
        "Samples that statistics are taken over: a device's (local), a leaf's (leaf, with leaves) or the whole"
        " batch (global); or two of them: local,global."
    )


class MachineFlags(flags.Flags):
    """The flags of what the machine file does not say; they hold for all machines."""

    synchronisation_loss: float | None = flags.flag(
        "Times as long that computation takes on several devices as on one (assumed: 1.05)."
    )
    fixed_share: float | None = flags.flag(
        "Share of the layer times that no batch changes, where they are known at one batch (assumed: 0.09)."
    )
    contention: float | None = flags.flag(
        "Times as long as alone that a collective takes beside backward (assumed: 1.875)."
    )
    collective_overhead: str | None = flags.flag("What the host adds to each collective, like 20us (assumed: 0).")

    def of(self, workload: Workload, machine: Machine, devices: Sequence[int]) -> Machine:
        """Return a machine with what the flags state of it. Raises ``ConfigError`` with the flag."""
        import math

        from dpsim.model.defaults import with_stated
        from dpsim.units import parse_duration

        if self.synchronisation_loss is not None and not 1 <= self.synchronisation_loss < math.inf:
            raise ConfigError(
                f"--synchronisation-loss is {self.synchronisation_loss}",
                allowed="a finite number of 1 or more: times as long as on one device",
            )
        for flag, field, given in (
            ("--synchronisation-loss", "compute_slowdown", self.synchronisation_loss),
            ("--fixed-share", "fixed_share", self.fixed_share),
            ("--contention", "contention", self.contention),
            ("--collective-overhead", "collective_overhead_s", self.collective_overhead),
        ):
            if given is None:
                continue
            try:
                value = parse_duration(given) if isinstance(given, str) else given
                machine = with_stated(workload, machine, devices, field, value)
            except ConfigError as error:
                raise ConfigError(
                    f"{flag} {given}: {error.given}", allowed=error.allowed, remedy=error.remedy
                ) from error
        return machine


def predict(
    *,
    workload: Annotated[Path | None, Parameter(help="A workload file from dpsim profile.")] = None,
    machine: Annotated[
        str | None,
        Parameter(
            help="A machine file from dpsim calibrate, or a name of its --list; or several: the others are held"
            " against the first."
        ),
    ] = None,
    devices: Annotated[
        str | None, Parameter(help="Numbers of devices: 2,4,8 or 8..1024 (doubling), or layouts: 2x4.")
    ] = None,
    plans: PlanFlags,
    leaves: flags.LeafFlags,
    stated: MachineFlags,
    asked: find.FindFlags,
    ranking: rank.RankFlags,
    target_loss: Annotated[
        float | None, Parameter(help="A training loss to reach: also predict the time to it, with --convergence.")
    ] = None,
    convergence: Annotated[
        Path | None, Parameter(help="The file of steps to target losses, from the quality experiment.")
    ] = None,
    output: Annotated[Path | None, Parameter(help="Also write what --json prints to this file.")] = None,
    plot: Annotated[
        Path | None, Parameter(help="Draw efficiency and shares of the step against devices: a .png or .svg.")
    ] = None,
    page: Annotated[
        Path | None,
        Parameter(
            help="Write a page on which you move sliders and see the predicted step, one file to open or send; without"
            " --workload, --machine or --devices it begins with GoogLeNet on K80s, 10gbe and 8."
        ),
    ] = None,
    json: flags.Json = False,
) -> None:
    """Predict step times from a workload file and a machine file; needs no MPI.

    Every rule is combined with every algorithm and every batch. All rows use
    the same overlap.
    """
    import sys

    from dpsim import codec, jit
    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.collective import parse_devices
    from dpsim.model import predict_on_machines, predict_points
    from dpsim.model.critical_batch import add_time_to_target
    from dpsim.model.defaults import for_prediction
    from dpsim.optimizer import Sgd, changed
    from dpsim.report.prediction import best_sentence, columns, faster_with_fewer, notes, verdicts
    from dpsim.report.prediction_chart import scaling_chart
    from dpsim.setting import Grid

    if page is not None:
        others = [name for each in (plans, leaves, stated, asked, ranking) for name in each.given()]
        others += flags.provided(target_loss=target_loss, convergence=convergence, output=output, plot=plot)
        _page(page, workload, machine, devices, others + ["json"] * json)
        return
    if workload is None or machine is None or devices is None:
        missing = "--workload" if workload is None else "--machine" if machine is None else "--devices"
        raise ConfigError(f"{missing} is missing", allowed="--workload, --machine and --devices", remedy=_HELP)
    files = flags.listed("--machine", machine, Path) or ()
    flags.writable(output, "output", inputs=tuple(path for path in (workload, *files, convergence) if path))
    outputs.drawable(plot)
    profiled, counts = workloads.read(workload), flags.counts_or_layouts(devices)
    numbers = [parse_devices(count)[0] for count in counts]
    target, by_name = asked.target(), {str(path): machines.read(path) for path in files}

    def prepared(machine: Machine, numbers: Sequence[int]) -> Machine:
        return for_prediction(profiled, stated.of(profiled, machine, numbers), numbers)

    known = {name: prepared(each, numbers) for name, each in by_name.items()}
    calibrated = next(iter(known.values()))
    fields = plans.values() | leaves.values()
    if "optimizer" in fields:
        fields["optimizer"] = changed(Sgd(), fields["optimizer"], {})
    grid = Grid.of(devices=counts, **fields)
    fit = _convergence(target_loss, convergence)
    if not jit.keeps():
        print(
            "dpsim: there is no writable folder for compiled code, so the simulator is compiled now, which takes up to"
            " a minute\n  to do:   name one: NUMBA_CACHE_DIR=FOLDER, or set HOME",
            file=sys.stderr,
        )
    if ranking.rank is not None:
        find.refuse_beside("--rank", {"--find": asked.find, "--plot": plot, "--target-loss": target_loss})
        rank.rank(ranking, profiled, known, counts, fields, output, json=json)
        return
    if ranking.given():
        flag = "--memory" if ranking.memory is not None else "--all"
        raise ConfigError(f"{flag} without --rank strategy", remedy=f"leave {flag} out, or add --rank strategy")
    if asked.find is not None:
        find.refuse_beside("--find", {"--plot": plot, "--target-loss": target_loss})
        found = find.answers(asked.find, target, profiled, by_name, grid, prepared)
        find.show_answers(found, {"workload": str(workload), "machine": machine}, output, json=json)
        return
    if len(known) > 1:
        points, summary = predict_on_machines(profiled, known, grid)
    else:
        points, summary = predict_points(profiled, calibrated, grid)
    if fit is not None:
        add_time_to_target(points, summary, fit)
    summary |= {"workload": str(workload), "machine": machine, "machine_name": calibrated.name}
    weak = summary["scaling"] == "weak"
    if plot is not None:
        outputs.draw_plot(plot, scaling_chart(points, summary["best"], weak=weak))
    if output is not None or json:
        shown = show.json_object("predict", points, summary)
        if output is not None:
            codec.write(output, shown)
        if json:
            print(codec.to_json(shown))
            return
    network = {path: each.name if each.network == "node" else each.network for path, each in known.items()}
    title = f"{profiled.name}, with the collectives of {' and '.join(network.values())}"
    show.table(columns(points, weak=weak), points, title=title)
    for best in summary["best"]:
        faster = faster_with_fewer(best, summary["best"], "local_batch" if weak else "global_batch")
        print(best_sentence(best, faster, weak=weak))
    for sentence in [*verdicts(summary, weak=weak), *summary.get("time_to_target", [])]:
        print(sentence)
    for sentence in [*notes(points, summary), *summary["cautions"]]:
        print(f"Note: {sentence}.")


def _page(page: Path, workload: Path | None, machine: str | None, devices: str | None, others: list[str]) -> None:
    """Write the page with sliders. Raises ``ConfigError`` for flags that it has no use for."""
    import shlex

    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.codec import write_text
    from dpsim.explore import page as pages
    from dpsim.explore.world import EXAMPLE_MACHINE, EXAMPLE_WORKLOAD

    if others:
        names = ", ".join(map(flags.flag_of, others))
        raise ConfigError(f"{names} with --page", remedy=f"leave {names} out: the page has a slider for each setting")
    flags.writable(page, "page", flag="--page", inputs=tuple(p for p in (workload, machine and Path(machine)) if p))
    file, name = workload or EXAMPLE_WORKLOAD, machine or EXAMPLE_MACHINE
    begin = flags.provided(devices=devices and flags.devices_or_layout(devices))
    files = shlex.join(["--workload", str(file), "--machine", name])
    write_text(page, pages.page(workloads.read(file), machines.read(name), files, **begin))
    print(f"Open  {page}")


def _convergence(target_loss: float | None, path: Path | None) -> Convergence | None:
    """The fit of steps to the target loss, ``None`` where none is asked for. Raises ``ConfigError``."""
    from dpsim.records import convergence

    if (target_loss is None) != (path is None):
        raise ConfigError(
            "--target-loss without --convergence" if path is None else "--convergence without --target-loss",
            allowed="both, or neither",
            remedy="python -m dpsim.experiments.quality --output FOLDER writes FOLDER/convergence.json",
        )
    return None if target_loss is None or path is None else convergence.read(path).find(target_loss)
