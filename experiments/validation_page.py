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

    def both(name: str, decimals: int = 1) -> str:
        return " and ".join(_percent(score, name, decimals) for score in (collectives, steps))

    text = (
        f"On [measurements that other people published](reports/validation/report.md), {collectives['rows']} "
        f"allreduces and {steps['rows']} steps of {len(scores) - 2} sets, each predicted without having seen it, "
        f"dpsim is {both('median_abs_error')} off in the median, and a simple guess, chosen beforehand, "
        f"{both('null_median_abs_error')}. Of the measurements {both('coverage', 0)} lie inside 90 % intervals "
        "([how this is judged](docs/validate.md))."
    )
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False) + "\n"


def _percent(score: Mapping[str, Any], name: str, decimals: int = 1) -> str:
    return f"{score[name] * 100:.{decimals}f} %"


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
