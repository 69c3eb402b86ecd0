"""``dpsim predict``: step times from files alone."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.algorithms import ALGORITHMS
from dpsim.cli import find, flags, outputs, rank, readers, show
from dpsim.errors import ConfigError
from dpsim.registry import listed

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.records.convergence import Convergence
    from dpsim.setting import Grid
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
    --rank strategy --memory 16GiB --set optimizer=adamw
  dpsim predict --workload w.json --machine 25gbe --page meeting.html
  dpsim predict --collective allreduce --size 64MiB --devices 8,2x8
    --machine nvlink3-8gpu+hdr-ib{flags.WORDS}"""
SHOWN = (
    "--workload --machine --devices --global-batch --local-batch --fusion-rule --fusion-threshold "
    "--algorithm --strategy --find --efficiency --rank --memory --page --json"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""
_HELP = "see dpsim predict --help"
_RECOMPUTE = "recompute"
_ASSUMED = (
    "compute_slowdown",
    "loss_growth",
    "fixed_share",
    "contention",
    "computation_taken",
    "collective_overhead_s",
)


class FileFlags(flags.Flags):
    """The flags of what is predicted, where, and on how many devices."""

    workload: Path | None = flags.flag("A workload file from dpsim profile.")
    machine: str | None = flags.flag(
        "A machine file from dpsim calibrate, or a name of its --list; or several: the others are held against the "
        "first."
    )
    devices: str | None = flags.flag("Numbers of devices: 2,4,8 or 8..1024 (doubling), or layouts: 2x4.")
    collective: str | None = flags.flag(
        "Price collectives alone instead, from --machine: allreduce, reduce-scatter, all-gather, broadcast."
    )
    size: str | None = flags.flag("With --collective: the bytes of the whole array, like 1MiB,64MiB.")

    def machines(self) -> tuple[Path, ...]:
        """Return the machine files. Raises ``ConfigError``."""
        return readers.listed("--machine", self.machine, Path) or ()


class PlanFlags(
    flags.Flags,
    of="global_batch... local_batch... fusion_rule... fusion_threshold_bytes... algorithm... batch_norm... strategy",
    by_set="accumulate... cycle_s overlap wire_dtype leaves optimizer",
):
    """The flags of the plans that are predicted."""

    global_batch: str | None = flags.flag("Samples per step over all devices, one number or a list: strong scaling.")
    local_batch: str | None = flags.flag(
        "Samples that a device has at once, one number or a list: weak scaling (the largest profiled)."
    )
    algorithm: str | None = flags.flag(f"List of {listed(ALGORITHMS)}.")
    batch_norm: str | None = flags.flag(
        "Samples that statistics are taken over: a device's (local), a leaf's (leaf, with leaves) or the whole"
        " batch (global); or two of them: local,global."
    )
    reproducible: flags.Reproducible = None
    assume: list[str] | None = flags.flag(
        "What the machine file does not say, as NAME=VALUE,NAME=VALUE: compute_slowdown, times as long that computation"
        " takes on two devices as on one (assumed: 1.05); loss_growth, what each further doubling of them adds to its"
        " logarithm (assumed: 0.01); fixed_share of the layer times that no batch changes, where they are known at"
        " one batch (assumed: 0.09); contention, times as long as alone that a collective takes beside backward"
        " (assumed: 1.8); computation_taken, the part of its time inside a node that computation then takes longer"
        " (assumed: 0.5); collective_overhead_s, what the host adds to each collective, like 20us"
        " (assumed: 0). And recompute=none or all: whether backward computes the activations of the script's blocks"
        " again, as torch.utils.checkpoint does (as profiled).",
        negative="",
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a grid. Raises ``ConfigError``."""
        from dpsim.optimizer import Sgd, changed

        fields = self.values()
        return fields | ({"optimizer": changed(Sgd(), fields["optimizer"], {})} if "optimizer" in fields else {})

    def recomputing(self, workload: Workload) -> Workload:
        """Return a workload with the recomputation that ``--assume`` states. Raises ``ConfigError``."""
        from dpsim.model.recomputation import recomputing

        text = self._assigned_assumptions().get(_RECOMPUTE)
        return workload if text is None else recomputing(workload, text)

    def _assigned_assumptions(self) -> dict[str, str]:
        from dpsim.fields import assigned

        return assigned(self.assume or (), "--assume", (*_ASSUMED, _RECOMPUTE))

    def assumed(self, workload: Workload, machine: Machine) -> Machine:
        """Return a machine with what ``--assume`` states of it. Raises ``ConfigError``."""
        from dpsim.model.defaults import with_stated
        from dpsim.units import parse_duration

        for field, text in self._assigned_assumptions().items():
            if field == _RECOMPUTE:
                continue
            try:
                value = parse_duration(text) if field.endswith("_s") else float(text)
                if field == "compute_slowdown" and not 1 <= value < math.inf:
                    raise ConfigError("", allowed="a finite number of 1 or more: times as long as on one device")
                machine = with_stated(workload, machine, field, value)
            except ConfigError as error:
                given = f"--assume {field}={text}" + f": {error.given}" * bool(error.given)
                raise ConfigError(given, allowed=error.allowed, remedy=error.remedy) from error
            except ValueError:
                raise ConfigError(f"--assume {field}={text}", allowed="a number") from None
        return machine


class AnswerFlags(flags.Flags):
    """The flags of what is said, and where it goes."""

    target_loss: str | None = flags.flag(
        "LOSS:FILE, a training loss to reach, and the quality experiment's file of steps to it: also predict the time."
    )
    output: Path | None = flags.flag("Also write what --json prints to this file.")
    plot: Path | None = flags.flag("Draw efficiency and shares of the step against devices: a .png or .svg.")
    page: Path | None = flags.flag(
        "Write a page on which you move sliders and see the predicted step, one file to open or send; without"
        " --workload, --machine or --devices it begins with GoogLeNet on K80s, 10gbe and 8."
    )
    json: flags.Json = False

    def convergence(self) -> Path | None:
        """Return the file of ``--target-loss``, ``None`` without one. Raises ``ConfigError`` for none in it."""
        if self.target_loss is None:
            return None
        loss, _, path = self.target_loss.partition(":")
        try:
            number = float(loss)
        except ValueError:
            number = math.nan
        if not path or not math.isfinite(number):
            raise ConfigError(
                f"--target-loss {self.target_loss}",
                allowed="a loss and a file of steps to it, like 0.5:FOLDER/convergence.json",
                remedy="python -m dpsim.experiments.quality --output FOLDER writes FOLDER/convergence.json",
            )
        return Path(path)

    def fit(self) -> Convergence | None:
        """Return the fit of steps to the target loss, ``None`` where none is asked for. Raises ``ConfigError``."""
        from dpsim.records import convergence

        path = self.convergence()
        return None if path is None else convergence.read(path).find(float(str(self.target_loss).partition(":")[0]))


def predict(
    *, files: FileFlags, plans: PlanFlags, asked: find.FindFlags, ranking: rank.RankFlags, answer: AnswerFlags
) -> None:
    """Predict step times from a workload file and a machine file; needs no MPI.

    Every rule is combined with every algorithm and every batch. All rows use
    the same overlap.
    """
    from dpsim import jit

    if answer.page is not None:
        others = [each.spelled(name) for each in (plans, asked, ranking, answer) for name in each.given()]
        _page(answer.page, files, [flag for flag in others if flag != "--page"])
        return
    if files.collective is not None or files.size is not None:
        _collectives(files, plans, asked, ranking, answer)
        return
    question = _Question.of(files, plans, answer)
    target, fit = asked.target(), answer.fit()
    if not jit.keeps():
        print(
            "dpsim: there is no writable folder for compiled code, so the simulator is compiled now, which takes up to"
            " a minute\n  to do:   name one: NUMBA_CACHE_DIR=FOLDER, or set HOME",
            file=sys.stderr,
        )
    beside: dict[str, object] = {"--plot": answer.plot, "--target-loss": answer.target_loss}
    if ranking.is_asked():
        find.refuse_beside("--rank", {"--find": asked.find} | beside)
        rank.rank(
            ranking, question.workload, question.machines, question.grid, plans.spelled, answer.output, json=answer.json
        )
    elif asked.find is not None:
        find.refuse_beside("--find", beside)
        answers = find.answers(asked.find, target, question.workload, question.read, question.grid, question.prepared)
        find.show_answers(answers, question.named, answer.output, json=answer.json)
    else:
        points, summary = question.predicted(fit)
        _show(question, answer, points, summary)


def _collectives(
    files: FileFlags, plans: PlanFlags, asked: find.FindFlags, ranking: rank.RankFlags, answer: AnswerFlags
) -> None:
    """Price collectives alone. Raises ``ConfigError`` for flags that say nothing of one."""
    from dpsim.cli.collective_alone import predict_collectives

    taken = ("--machine", "--devices", "--collective", "--size", "--algorithm", "--output", "--plot", "--json")
    given = [each.spelled(name) for each in (files, plans, asked, ranking, answer) for name in each.given()]
    find.refuse_beside("--collective", {flag: flag for flag in given if flag not in taken})
    texts = {name: getattr(files, name) for name in ("collective", "size", "devices", "machine")}
    predict_collectives(texts, plans.algorithm, answer.output, answer.plot, json=answer.json)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A workload, machines and a grid: all that is predicted from."""

    workload: Workload
    read: dict[str, Machine]
    """The machines as their files have them, by the names that were given."""
    grid: Grid
    plans: PlanFlags
    named: dict[str, str]
    """The files as they were given."""

    @classmethod
    def of(cls, files: FileFlags, plans: PlanFlags, answer: AnswerFlags) -> _Question:
        """Read the files. Raises ``ConfigError``."""
        from dpsim import machine as machines
        from dpsim import workload as workloads
        from dpsim.setting import Grid

        if files.workload is None or files.machine is None or files.devices is None:
            missing = next(name for name in ("workload", "machine", "devices") if getattr(files, name) is None)
            raise ConfigError(f"--{missing} is missing", allowed="--workload, --machine and --devices", remedy=_HELP)
        paths = files.machines()
        flags.writable(
            answer.output, "output", inputs=[path for path in (files.workload, *paths, answer.convergence()) if path]
        )
        outputs.drawable(answer.plot)
        workload, counts = plans.recomputing(workloads.read(files.workload)), readers.counts_or_layouts(files.devices)
        return cls(
            workload=workload,
            read={str(path): machines.read(path) for path in paths},
            grid=Grid.of(devices=counts, **plans.fields()),
            plans=plans,
            named={"workload": str(files.workload), "machine": files.machine},
        )

    def prepared(self, machine: Machine) -> Machine:
        """Return a machine with what is stated and assumed of it."""
        from dpsim.model.defaults import for_prediction

        return for_prediction(self.workload, self.plans.assumed(self.workload, machine))

    @functools.cached_property
    def machines(self) -> dict[str, Machine]:
        """The machines that prices use."""
        return {name: self.prepared(machine) for name, machine in self.read.items()}

    def predicted(self, fit: Convergence | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the predicted rows and their summary, with the time to a target loss where there is a fit."""
        from dpsim.model import predict_on_machines, predict_points
        from dpsim.model.critical_batch import add_time_to_target

        first = next(iter(self.machines.values()))
        if len(self.machines) > 1:
            points, summary = predict_on_machines(self.workload, self.machines, self.grid)
        else:
            points, summary = predict_points(self.workload, first, self.grid)
        if fit is not None:
            add_time_to_target(points, summary, fit)
        return points, summary | self.named | {"machine_name": first.name}


def _show(question: _Question, answer: AnswerFlags, points: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the rows and what they come to, or all of it as JSON, which also goes into the output; draw the plot."""
    from dpsim.report.prediction import best_sentence, columns, faster_with_fewer, notes, verdicts
    from dpsim.report.prediction_chart import scaling_chart

    weak = summary["scaling"] == "weak"
    if answer.plot is not None:
        outputs.draw_plot(answer.plot, scaling_chart(points, summary["best"], weak=weak))
    if show.as_json("predict", points, summary, answer.output, json=answer.json):
        return
    networks = [each.name if each.network == "node" else each.network for each in question.machines.values()]
    title = f"{question.workload.name}, with the collectives of {' and '.join(networks)}"
    show.table(columns(points, weak=weak), points, title=title)
    for best in summary["best"]:
        faster = faster_with_fewer(best, summary["best"], "local_batch" if weak else "global_batch")
        print(best_sentence(best, faster, weak=weak))
    for sentence in [*verdicts(summary, weak=weak), *summary.get("time_to_target", [])]:
        print(sentence)
    for sentence in [*notes(points, summary), *summary["cautions"]]:
        print(f"Note: {sentence}.")


def _page(page: Path, of: FileFlags, others: list[str]) -> None:
    """Write the page with sliders. Raises ``ConfigError`` for flags that it has no use for."""
    import shlex

    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.codec import write_text
    from dpsim.explore import page as pages
    from dpsim.explore.world import EXAMPLE_MACHINE, EXAMPLE_WORKLOAD

    if others:
        names = ", ".join(others)
        raise ConfigError(f"{names} with --page", remedy=f"leave {names} out: the page has a slider for each setting")
    inputs = [path for path in (of.workload, of.machine and Path(of.machine)) if path]
    flags.writable(page, "page", flag="--page", inputs=inputs)
    file, name = of.workload or EXAMPLE_WORKLOAD, of.machine or EXAMPLE_MACHINE
    begin = readers.provided(devices=of.devices and readers.devices_or_layout(of.devices))
    files = shlex.join(["--workload", str(file), "--machine", name])
    write_text(page, pages.page(workloads.read(file), machines.read(name), files, **begin))
    print(f"Open  {page}")
