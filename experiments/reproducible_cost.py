"""``python -m dpsim.experiments.reproducible_cost`` times reproducible training against the plain one.

In each case every mode trains a replica of its own on pinned ranks, and they take turns of a few steps in random
order. It prints medians, ratios to the plain step with 95 % intervals, and the plain step's ratio to itself (A/A).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.codec import Noun
from dpsim.data import load_dataset
from dpsim.experiments import command
from dpsim.experiments.cases import Measured, Record, Study, ratio_lines
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.nn.tokens import with_setting
from dpsim.plan import BatchNormMode, Plan
from dpsim.progress import Progress
from dpsim.report.charts import Chart, Lines, Series
from dpsim.report.content import Content, ReportFigure, environment_facts
from dpsim.report.table import Column, Table, table
from dpsim.report.words import counted
from dpsim.report.write import write_content
from dpsim.runtime.trainer import Trainer
from dpsim.study.loop import LEAST_ROUNDS, StopRule, in_turns
from dpsim.study.steps import COUNTED_STEPS, WARM_UP_STEPS, step_times_s

RECORD = "cost.json"
PLAIN, AGAIN = "plain", "plain again"
_VISIT_S = 0.3
_MLP = "mlp:2048,2048,2048"
_RULES = (
    "Plain and reproducible training of one model at one global batch, each on a replica of its own, take turns of a "
    "few steps in random order, in one run on ranks pinned to cores. The first two steps of a turn and the first "
    "round do not count.",
    "A step lasts from the slowest rank's end to the next one's. A turn gives one median; ratios are those of the "
    "medians over rounds, with their 95 % interval over paired rounds.",
    "Plain training runs twice: its ratio to itself is the noise.",
)


class Mode(Noun, frozen=True):
    """The number of leaves (0: plain training), the batch-norm mode, and the column blocks of layers (1: none)."""

    leaves: int
    batch_norm: BatchNormMode = "leaf"
    column_blocks: int = 1

    @property
    def name(self) -> str:
        """``8 leaves, batch norm leaf``, or ``8 column blocks``."""
        if self.column_blocks > 1:
            return f"{self.column_blocks} column blocks" + (f", {self.leaves} leaves" if self.leaves else "")
        return f"{self.leaves} leaves, batch norm {self.batch_norm}" if self.leaves else f"batch norm {self.batch_norm}"


class Case(Noun, frozen=True):
    """Plain training of a model (batch norm ``local``), and the modes to compare with it, at one global batch.

    ``limit`` is the largest allowed ratio of the first mode's step to the plain one (None: no limit is set).
    """

    model: str
    dataset: str
    devices: int
    global_batch: int
    modes: tuple[Mode, ...]
    limit: float | None = None

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}, B = {self.global_batch}"

    @property
    def limits(self) -> dict[str, float]:
        return {} if self.limit is None else {self.modes[0].name: self.limit}

    def trainings(self) -> dict[str, tuple[str, Plan]]:
        """Return the model and the plan of the plain training, of each mode, and of the plain training again."""
        plain = Mode(leaves=0, batch_norm="local")
        modes = {PLAIN: plain} | {mode.name: mode for mode in self.modes} | {AGAIN: plain}
        return {
            name: (
                with_setting(self.model, "column_blocks", str(mode.column_blocks)),
                Plan(
                    devices=self.devices, global_batch=self.global_batch, leaves=mode.leaves, batch_norm=mode.batch_norm
                ),
            )
            for name, mode in modes.items()
        }


Cost = Measured[Case]
"""A case, and seconds of a step of ``plain``, ``plain again`` and each mode, one number a round."""


def cases() -> tuple[Case, ...]:
    """Return small models with every mode, then the large MLP over the global batch, on one and two devices."""
    leaves = tuple(Mode(leaves=count) for count in (8, 32, 64))
    norms = (*leaves, Mode(leaves=8, batch_norm="global"), Mode(leaves=0, batch_norm="global"))
    blocks = tuple(Mode(leaves=leaves, batch_norm="leaf" if leaves else "local", column_blocks=8) for leaves in (0, 8))
    images, digits, flat = "synthetic:32x32x3,classes=10", "digits", "synthetic:28x28x1,classes=10"
    cases = []
    for devices in (1, 2):
        for model, dataset in (("resnet20", images), ("cnn", images), ("cnn", digits)):
            cases.append(Case(model=model, dataset=dataset, devices=devices, global_batch=128, modes=norms, limit=1.10))
        for batch in (1024, 512, 256, 128, 64):
            limit = {1: 1.20, 2: 1.15}[devices] if batch == 1024 else None
            cases.append(Case(model=_MLP, dataset=flat, devices=devices, global_batch=batch, modes=leaves, limit=limit))
        for model, dataset in (("mlp:256x8", digits), (_MLP, flat), ("cnn:128,128,128", images)):
            cases.append(Case(model=model, dataset=dataset, devices=devices, global_batch=256, modes=blocks))
    return tuple(cases)


STUDY: Study[Case] = Study(
    name="reproducible_cost",
    schema="dpsim.reproducible-cost/2",
    record=Record[Case],
    samples=(PLAIN, AGAIN),
    task="dpsim.experiments.reproducible_cost:measure_on_ranks",
)


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """Time the plans of a case for ``seconds``: the median step of each round, by name; each trains its own replica.

    A visit has two steps that do not count and one to six that do. A step lasts from the slowest rank's end to the
    next one's.
    """
    case = codec.decode(argument["case"], Case, "case")
    dataset = load_dataset(case.dataset)
    trainers = {
        name: Trainer(build_model(model, dataset.input_shape, dataset.classes), dataset, plan, comm, Network())
        for name, (model, plan) in case.trainings().items()
    }
    first = next(iter(trainers.values()))
    first.step()
    marks = first.step().marks
    counted = comm.bcast(max(1, min(COUNTED_STEPS, int(_VISIT_S / (marks.end_s - marks.begin_s)))))

    def visit(trainer: Trainer) -> float:
        comm.Barrier()
        ends_s = [trainer.step().marks.end_s for _ in range(WARM_UP_STEPS + counted)]
        return float(np.median(step_times_s(comm.allgather(ends_s))))

    visits = {name: lambda trainer=trainer: visit(trainer) for name, trainer in trainers.items()}
    step_s = in_turns(visits, StopRule(least_rounds=LEAST_ROUNDS, most_s=argument["seconds"]), comm=comm)
    for trainer in trainers.values():
        trainer.close()
    return step_s


def lines(measured: Cost) -> Iterator[str]:
    """Yield a case as lines of text for the terminal."""
    case = measured.case
    yield f"{case.title}, {counted(case.devices, 'device')}, {len(measured.samples[PLAIN])} rounds"
    yield from ratio_lines(measured.samples, PLAIN, case.limits)


def write_report(folder: Path, record: Record[Case]) -> list[Path]:
    """Write the page, the Markdown and the figure of the curve over the batch. Raises ``ConfigError``."""
    figures = []
    if curves := _curves(record):
        caption = (
            "Reproducible training's step over the plain one's at the same global batch, against the batch: "
            f"{curves[0].case.model}, whose weights take 40 MB. Bars: 95 % intervals."
        )
        panels = [_panel(devices, curves) for devices in sorted({each.case.devices for each in curves})]
        chart, title = Chart(panels=panels, height_in=3.4), "Cost against the global batch"
        figures.append(ReportFigure(name="cost", title=title, caption=caption, chart=chart))
    return write_content(folder, content(record), figures)


def content(record: Record[Case]) -> Content:
    """Return what the report of the costs says."""
    return Content(
        name="cost of reproducible training",
        heading="What do the same bits on any number of devices cost?",
        question="How much longer does a step take with --reproducible than without, at the same global batch?",
        answers=tuple(_answers(record)),
        cards=(),
        tables=(_table(record),),
        warnings=(),
        rules=_RULES,
        facts=(("measured", f"{record.measured_from} to {record.measured_until}"),),
        environment=environment_facts(record.environment),
    )


def _answers(record: Record[Case]) -> Iterator[str]:
    for measured in record.measured:
        case = measured.case
        for name, limit in case.limits.items():
            over, noise = measured.ratio(name, PLAIN), measured.ratio(AGAIN, PLAIN)
            yield (
                f"{case.title}, {counted(case.devices, 'device')}: {over.median - 1:+.1%} with {name} "
                f"({over.low - 1:+.1%} to {over.high - 1:+.1%}; plain against plain {noise.median - 1:+.1%}), "
                f"{'within' if over.median <= limit else 'OVER'} the limit of {limit - 1:+.0%}."
            )


def _table(record: Record[Case]) -> Table:
    sections: dict[str, list[tuple[Cost, str]]] = {}
    for measured in record.measured:
        case = measured.case
        rows = sections.setdefault(f"{case.model} on {case.dataset}, {counted(case.devices, 'device')}", [])
        rows += [(measured, name) for name in measured.samples]

    def interval(row: tuple[Cost, str]) -> str:
        over = row[0].ratio(row[1], PLAIN)
        return f"{over.low:.3f} to {over.high:.3f}"

    def limit(row: tuple[Cost, str]) -> str:
        limits = row[0].case.limits
        return f"{limits[row[1]]:.2f}" if row[1] in limits else ""

    return table(
        title="Steps",
        columns=(
            Column(head="B", cell=lambda row: str(row[0].case.global_batch)),
            Column(head="mode", cell=lambda row: row[1], left=True),
            Column(head="step", cell=lambda row: f"{np.median(row[0].samples[row[1]]) * 1e3:.2f} ms"),
            Column(head="over plain", cell=lambda row: f"{row[0].ratio(row[1], PLAIN).median:.3f}"),
            Column(head="95 %", cell=interval, left=True, dispensable=1),
            Column(head="limit", cell=limit),
            Column(head="rounds", cell=lambda row: str(len(row[0].samples[row[1]])), dispensable=2),
        ),
        sections=sections,
        note="Plain: batch norm local, gradients summed rank after rank; medians.",
    )


def _curves(record: Record[Case]) -> list[Cost]:
    """Return the cases of the first model with several batches."""
    batches: dict[str, set[int]] = {}
    for measured in record.measured:
        batches.setdefault(measured.case.model, set()).add(measured.case.global_batch)
    several = [model for model, sizes in batches.items() if len(sizes) > 1]
    return [measured for measured in record.measured if measured.case.model in several[:1]]


def _panel(devices: int, curves: Sequence[Cost]) -> Lines:
    curve = sorted((each for each in curves if each.case.devices == devices), key=lambda each: each.case.global_batch)
    batches = [each.case.global_batch for each in curve]
    series = [Series(name="", x=batches, y=[1.0] * len(batches), look="baseline")]
    for number, mode in enumerate(curve[0].case.modes):
        ratios = [each.ratio(mode.name, PLAIN) for each in curve]
        median, low, high = ([getattr(ratio, end) for ratio in ratios] for end in ("median", "low", "high"))
        series.append(Series(name=f"{mode.leaves} leaves", x=batches, y=median, low=low, high=high, look=number))
    return Lines(
        title=counted(devices, "device"),
        subtitle="step over the plain one",
        x_label="global batch",
        series=series,
        x_ticks={float(batch): str(batch) for batch in batches},
        log_x=True,
    )


def main() -> int:
    options = command.parser("reproducible_cost", __doc__)
    options.add_argument("--model", default="*", help="models to time, such as 'resnet*' (all)")
    options.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    options.add_argument("--global-batch", type=int, nargs="+", help="global batches to time (all)")
    options.add_argument("--seconds", type=float, default=20.0, help="for each case")
    options.add_argument("--output", type=Path, help="folder for the record and the report")
    given = options.parse_args()
    selected = [
        case
        for case in cases()
        if fnmatch.fnmatch(case.model, given.model)
        and case.devices in given.devices
        and (given.global_batch is None or case.global_batch in given.global_batch)
    ]
    if not selected:
        options.error(f"no case fits; there are {', '.join(sorted({case.model for case in cases()}))}")

    def run() -> None:
        record = STUDY.measure(
            selected, done=lambda measured: print("\n".join(lines(measured)), flush=True), seconds=given.seconds
        )
        if given.output is not None:
            codec.write_record(given.output / RECORD, record)
            written = write_report(given.output, record)
            print(f"report: {next(path for path in written if path.suffix == '.html')}")

    return command.ended("reproducible_cost", run)


if __name__ == "__main__":
    raise SystemExit(main())
