"""``python -m dpsim.experiments.quality --output FOLDER`` measures what local batch, batch norm and global batch do.

It fits and predicts, writes the predictions, then trains what was held out, and prints every figure with its baseline.
The folder has the record, the report, the figures, and ``convergence.json`` for ``dpsim predict``. A run that was cut
off goes on from its finished trainings.
"""

from __future__ import annotations

from pathlib import Path

from dpsim.dtypes import COMPUTE_DTYPES
from dpsim.experiments import command
from dpsim.harness.quality.study import study_quality
from dpsim.records.quality import read_study
from dpsim.report.quality.content import answers
from dpsim.report.quality.write import write_quality_report


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
    given = options.parse_args()
    declared = given.study or Path(__file__).parent / ("quick.toml" if given.quick else "full.toml")

    def run() -> None:
        study = read_study(declared)
        if given.compute_dtype is not None:
            study = study.multiplied_in(given.compute_dtype)
        results = study_quality(study, given.output, command.tell)
        write_quality_report(given.output, results)
        print("\n".join(answers(results)))
        print(f"report: {given.output / 'report.md'}")

    return command.ended("quality", run)


if __name__ == "__main__":
    raise SystemExit(main())
