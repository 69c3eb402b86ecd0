"""``python -m dpsim.experiments.quality --output FOLDER`` measures what local batch, batch norm and global batch do.

It fits and predicts, writes the predictions, then trains what was held out, and prints every figure with its baseline.
The folder has the record, the report, the figures, and ``convergence.json`` for ``dpsim predict``. A run that was cut
off goes on from its finished trainings.
"""

from __future__ import annotations

from pathlib import Path

from dpsim.cli import flags
from dpsim.dtypes import COMPUTE_DTYPES, ComputeDtype
from dpsim.experiments import command
from dpsim.harness.quality.study import study_quality
from dpsim.launch.workers import executor
from dpsim.progress import Progress
from dpsim.records.quality import QualityResults, read_study
from dpsim.report.quality import answers, write


def measured(
    study: str | Path, folder: Path, progress: Progress, compute_dtype: ComputeDtype | None = None, pool: str = "2"
) -> QualityResults:
    """Run a study in a folder, or go on with it, and write its report. Raises ``DpsimError``.

    ``study`` is a file, or ``quick`` or ``full``; ``compute_dtype`` goes before what it declares. ``pool`` trains: a
    number of processes, or the factory of an executor.
    """
    declared = read_study(study if isinstance(study, Path) else Path(__file__).with_name(f"{study}.toml"))
    declared = declared if compute_dtype is None else declared.multiplied_in(compute_dtype)
    with executor(pool) as held:
        results = study_quality(declared, folder, progress, held)
    write(folder, results)
    return results


def main() -> int:
    options = command.parser("quality", __doc__)
    options.add_argument("--output", type=Path, required=True, help="folder for the record, the report and the figures")
    options.add_argument("--quick", action="store_true", help="the small study: at most 3 minutes on 2 cores")
    options.add_argument("--study", type=Path, help="a study of your own, declared as quick.toml and full.toml are")
    options.add_argument(
        "--compute-dtype",
        choices=COMPUTE_DTYPES,
        help="round the operands of products and convolutions to this in all trainings, whatever the study declares",
    )
    options.add_argument("--executor", default="2", help=flags.EXECUTOR)
    given = options.parse_args()
    study = given.study or ("quick" if given.quick else "full")

    def run() -> None:
        results = measured(study, given.output, command.tell, given.compute_dtype, given.executor)
        print("\n".join(answers(results)))
        print(f"report: {given.output / 'report.md'}")

    return command.ended("quality", run)


if __name__ == "__main__":
    raise SystemExit(main())
