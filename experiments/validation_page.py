"""``python -m dpsim.experiments.validation_page`` writes the README's lines about published measurements.

It reads what ``python -m dpsim.validation --json`` prints: ``make validate`` pipes it, and writes the page beside it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from dpsim.errors import FileFormatError
from dpsim.experiments import command
from dpsim.experiments.command import ROOT, rewrite, with_parts

FOLDER = ROOT / "reports" / "validation"
README = ROOT / "README.md"
BEGIN = "<!-- validation: made by python -m dpsim.experiments.validation_page -->\n"
_WIDTH = 132


def readme_lines(summary: Mapping[str, Any]) -> str:
    """Return what the README says of all sets, from the ``summary`` of ``--json``."""
    scores = {score["dataset"]: score for score in summary["datasets"]}
    collectives, steps = scores["all collectives"], scores["all steps"]

    def both(name: str) -> str:
        return " and ".join(f"{score[name]:.1%}".replace("%", " %") for score in (collectives, steps))

    def inside(score: Mapping[str, Any]) -> str:
        low, high = score["coverage_of_clusters"]
        return f"{score['coverage']:.0%} ({low:.0%} to {high:.0%})".replace("%", " %")

    def scored(score: Mapping[str, Any]) -> str:
        low, high = score["interval_score_of_clusters"]
        constant = score["constant_interval_score"]
        return f"{score['interval_score']:.2f} ({low:.2f} to {high:.2f}), a constant factor {constant:.2f}"

    text = (
        f"On [measurements that others published](reports/validation/report.md), {collectives['rows']} allreduces of "
        f"{collectives['clusters']} clusters and {steps['rows']} steps of {steps['clusters']}, each cluster predicted "
        f"from the others, dpsim is {both('median_abs_error')} off in the median; a simple guess, chosen beforehand, "
        f"{both('null_median_abs_error')}. In 90 % intervals lie {inside(collectives)} and {inside(steps)}; the "
        f"interval score is {scored(collectives)}, and {scored(steps)} ([how this is judged](docs/validate.md))."
    )
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False) + "\n"


def main() -> int:
    command.parser("validation_page", __doc__).parse_args()

    def run() -> None:
        try:
            summary = json.load(sys.stdin)["summary"]
        except json.JSONDecodeError as error:
            raise FileFormatError(
                f"stdin is no JSON: {error}", allowed="what python -m dpsim.validation --json prints"
            ) from error
        rewrite(README, lambda text: with_parts(text, {BEGIN: lambda: readme_lines(summary)}))

    return command.ended("validation_page", run)


if __name__ == "__main__":
    raise SystemExit(main())
