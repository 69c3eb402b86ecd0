"""``python -m dpsim.experiments.validation_page`` predicts the published measurements, for the committed report.

It writes ``reports/validation`` and the lines of the README. Nothing is measured, and nothing is kept but the report:
``python -m dpsim.experiments.reports_page`` predicts again as well.
"""

from __future__ import annotations

import textwrap

from dpsim.experiments import command
from dpsim.experiments.command import ROOT, rewrite, with_parts
from dpsim.folder_lock import locked
from dpsim.launch.workers import workers
from dpsim.validation.page import write_validation
from dpsim.validation.run import Validation, validate
from dpsim.validation.scores import Score, pooled

FOLDER = ROOT / "reports" / "validation"
README = ROOT / "README.md"
BEGIN = "<!-- validation: made by python -m dpsim.experiments.validation_page -->\n"
_WIDTH = 132


def readme_lines(validation: Validation) -> str:
    """Return what the README says of all sets."""
    collectives, steps = pooled(validation.scores)
    shipped = next(score for score in pooled(validation.shipped_scores) if score.quantity == "step")

    def both(name: str, decimals: int = 1) -> str:
        return " and ".join(_percent(score, name, decimals) for score in (collectives, steps))

    text = (
        f"On [measurements that other people published](reports/validation/report.md), {collectives.rows} allreduces "
        f"and {steps.rows} steps of {len(validation.scores)} sets, each predicted without having seen it, dpsim is "
        f"{both('median_abs_error')} off in the median. A null that is chosen beforehand is "
        f"{both('null_median_abs_error')} off, and the best one of each set, chosen with hindsight, "
        f"{both('best_null_median_abs_error')}; {both('coverage', 0)} lie inside "
        "their 90 % intervals. What published machines leave open is taken from the "
        f"other sets; with the defaults that come with dpsim, which all of these sets imply, steps are "
        f"{_percent(shipped, 'median_abs_error')} off, and {_percent(shipped, 'too_fast', 0)} of them are predicted "
        "too fast. `dpsim validate` shows every set, the bad ones too ([how it judges](docs/validate.md))."
    )
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False) + "\n"


def _percent(score: Score, name: str, decimals: int = 1) -> str:
    return f"{getattr(score, name) * 100:.{decimals}f} %"


def main() -> int:
    options = command.parser("validation_page", __doc__)
    options.add_argument("--workers", type=int, default=1, help="processes that predict side by side (1)")
    count: int = options.parse_args().workers

    def run() -> None:
        with workers(count) as executor:
            result = validate(executor=executor)
        with locked(FOLDER):
            write_validation(FOLDER, result)
        rewrite(README, lambda text: with_parts(text, {BEGIN: lambda: readme_lines(result)}))
        print(f"report: {FOLDER / 'index.html'}")

    return command.ended("validation_page", run)


if __name__ == "__main__":
    raise SystemExit(main())
