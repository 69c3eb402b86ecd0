"""``python -m dpsim.experiments.quality --output FOLDER`` measures what local batch, batch norm and global batch do.

It fits and predicts, writes the predictions, then trains what was held out, and prints every figure with its baseline.
The folder has the record, the report, the figures, and ``convergence.json`` for ``dpsim predict``. A run that was cut
off goes on from its finished trainings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpsim.compute_dtype import COMPUTE_DTYPES
from dpsim.errors import DpsimError
from dpsim.harness.quality.study import study_quality
from dpsim.records.quality import read_study
from dpsim.report.quality.content import answers
from dpsim.report.quality.write import write_quality_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.quality", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the record, the report and the figures")
    parser.add_argument("--quick", action="store_true", help="the small study: at most 3 minutes on 2 cores")
    parser.add_argument("--study", type=Path, help="a study of your own, declared as quick.toml and full.toml are")
    parser.add_argument(
        "--compute-dtype",
        choices=COMPUTE_DTYPES,
        help="round the operands of products and convolutions to this in all trainings, whatever the study declares",
    )
    arguments = parser.parse_args()
    declared = arguments.study or Path(__file__).parent / ("quick.toml" if arguments.quick else "full.toml")
    try:
        study = read_study(declared)
        if arguments.compute_dtype is not None:
            study = study.multiplied_in(arguments.compute_dtype)
        results = study_quality(study, arguments.output, lambda line: print(line, file=sys.stderr, flush=True))
        write_quality_report(arguments.output, results)
    except DpsimError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    print("\n".join(answers(results)))
    print(f"report: {arguments.output / 'report.md'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
