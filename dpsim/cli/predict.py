"""``dpsim predict``: step times from files alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpsim.cli import find, flags, ledger, outputs, rank, readers, show
from dpsim.cli.hours import TrainingFlags
from dpsim.cli.predict_flags import AnswerFlags, FileFlags, PlanFlags
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from dpsim.machine import Machine
    from dpsim.model.hours import Training
    from dpsim.model.rows import PredictedRow
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
    --find bandwidth --target efficiency=90%
  dpsim predict --workload w.json --machine m.json --devices 8,16
    --samples 1.28M --epochs 90 --price 2.50
  dpsim predict --workload w.json --machine m.json --devices 8
    --rank strategy --memory 16GiB --set optimizer=adamw
  dpsim predict --workload w.json --machine 25gbe --page meeting.html
  dpsim predict --collective allreduce --size 64MiB --devices 8,2x8
    --machine nvlink3-8gpu+hdr-ib{flags.WORDS}"""
SHOWN = (
    "--workload --machine --devices --global-batch --local-batch --fusion-rule --fusion-threshold "
    "--algorithm --strategy --find --target --rank --samples --page --json"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""
_HELP = "see dpsim predict --help"


def predict(
    *,
    files: FileFlags,
    plans: PlanFlags,
    asked: find.FindFlags,
    of_training: TrainingFlags,
    ranking: rank.RankFlags,
    answer: AnswerFlags,
) -> None:
    """Predict step times from a workload file and a machine file; needs no MPI.

    Every rule is combined with every algorithm and every batch. All rows use
    the same overlap.
    """
    from dpsim import jit
    from dpsim.launch import workers

    others = [each.spelled(name) for each in (plans, asked, of_training, ranking, answer) for name in each.given()]
    if answer.page is not None:
        from dpsim.cli.page import write_page

        others.remove("--page")
        write_page(answer.page, files.workload, files.machine, files.devices, others)
        return
    if files.collective is not None or files.size is not None:
        from dpsim.cli.collective_alone import predict_collectives

        of = {name: getattr(files, name) for name in ("collective", "size", "devices", "machine")}
        others += [files.spelled(name) for name in files.given() if name not in of]
        predict_collectives(of, plans.algorithm, answer.output, answer.plot, others, json=answer.json)
        return
    training = of_training.training()
    target, fit = asked.wanted(training), answer.fit()
    question = _Question.of(files, plans, answer)
    if not jit.keeps():
        print(
            "dpsim: there is no writable folder for compiled code, so the simulator is compiled now, which takes up to"
            " a minute\n  to do:   name one: NUMBA_CACHE_DIR=FOLDER, or set HOME",
            file=sys.stderr,
        )
    beside: dict[str, object] = {"--plot": answer.plot, "--target-loss": answer.target_loss}
    beside["--executor"] = answer.given().get("executor")
    if ranking.is_asked():
        given = {of_training.spelled(name): name for name in of_training.given()}
        find.refuse_beside("--rank", {"--find": asked.find} | beside | given)
        rank.rank(
            ranking, question.workload, question.machines, question.grid, plans.spelled, answer.output, json=answer.json
        )
    elif asked.find is not None:
        find.refuse_beside("--find", beside)
        answers = find.answers(
            asked.find, target, question.workload, question.read, question.grid, question.prepared, training
        )
        find.show_answers(answers, question.named, answer.output, json=answer.json)
    else:
        with workers.executor(answer.executor) as executor:
            points, summary = question.predicted(fit, training, executor)
        _show(question, answer, points, summary)


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

    def keep(self, rows: Sequence[PredictedRow]) -> None:
        """Keep predicted rows in the ledger."""
        inputs = {"workload": self.workload} | {f"machine {name}": each for name, each in self.machines.items()}
        ledger.keep("predict", rows, inputs)

    def predicted(
        self, fit: Convergence | None, training: Training | None, executor: Executor | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the predicted rows and their summary, with what a training takes where there is one.

        With a fit it is the time to a target loss.
        """
        from dpsim.model.bits import letters
        from dpsim.model.critical_batch import add_time_to_target
        from dpsim.model.hours import add_hours
        from dpsim.model.points import compared, predict_grid

        first = next(iter(self.machines.values()))
        predicted = {
            name: predict_grid(self.workload, machine, self.grid, executor) for name, machine in self.machines.items()
        }
        rows = [row for each in predicted.values() for row in each.rows]
        self.keep(rows)
        if len(self.machines) > 1:
            points, summary = compared(predicted)
        else:
            (only,) = predicted.values()
            points, summary = [row.record() for row in only.rows], only.summary()
        if self.workload.ddp is None:
            for point, letter in zip(points, letters([row.bits for row in rows]), strict=True):
                point["bits"] = letter
        if fit is not None:
            add_time_to_target(points, summary, fit)
        if training is not None:
            add_hours(points, summary, training)
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
