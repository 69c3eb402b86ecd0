"""``python -m dpsim.experiments.reports_page`` draws all committed reports again from their records, and lists them.

Nothing is measured; the report on published measurements is predicted again, which takes most of the time. The list is
``reports/index.html``: each report with its question, its verdict and its main figure. With ``--output FOLDER`` a copy
is drawn there, and the committed reports stay as they are.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dpsim.codec import write_text
from dpsim.errors import ConfigError
from dpsim.experiments import command
from dpsim.experiments.accuracy.declared import experiments
from dpsim.experiments.accuracy.derive import derive
from dpsim.experiments.command import ROOT
from dpsim.harness.load import load
from dpsim.harness.sweep.questions import QUESTIONS
from dpsim.report.bench import content as bench_content
from dpsim.report.content import Content
from dpsim.report.page import ListedReport, list_page
from dpsim.report.quality import content as quality_content
from dpsim.report.reproduce import content as reproduce_content
from dpsim.report.sweep.summary import verdicts
from dpsim.report.write import PAGES
from dpsim.validation.page import content as validation_content
from dpsim.validation.page import write_validation
from dpsim.validation.run import validate

ACCURACY, SWEEPS, SAME_BITS, ALLREDUCE = "How right predictions are", "Sweeps", "The same bits", "The allreduce"
CONTENTS: Mapping[str, tuple[str, Callable[[Any], Content]]] = {
    "bench": (ALLREDUCE, bench_content),
    "reproduce": (SAME_BITS, reproduce_content),
    "quality": (ACCURACY, quality_content),
}
"""The section of reports of each kind of result but sweeps, and what such a report says."""
VALIDATION = "validation"
"""The folder of the report on published measurements. It keeps no record: the sets are in the package."""
SERVED: Mapping[str, str] = {"reproducibility/cost": SAME_BITS}
"""The section of each report whose experiment has served: nothing draws it again, it is listed as it stands."""
SECTIONS = (ACCURACY, SWEEPS, SAME_BITS, ALLREDUCE)


def committed(root: Path, name: str = "report.md") -> list[Path]:
    """Return the files below ``root`` that Git knows whose names end so. Raises ``ConfigError``."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--", f"*{name}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ConfigError(
            f"git does not list the reports in {root}: {listed.stderr.strip()}",
            allowed="a checkout of the repository",
            remedy="draw one report with dpsim report FOLDER",
        )
    return sorted((root / path for path in listed.stdout.split("\0") if path), key=lambda path: path.parent)


def write_reports(root: Path, folders: Iterable[Path]) -> Path:
    """Draw the reports in the folders again, and list them in ``root``; returns the list. Raises ``DpsimError``."""
    sections: dict[str, list[ListedReport]] = {title: [] for title in SECTIONS}
    for folder in folders:
        begin_s = time.monotonic()
        section, report = _drawn(root, folder)
        sections[section].append(report)
        command.tell(f"{time.monotonic() - begin_s:5.1f} s  {folder}")
    page = root / PAGES["html"]
    write_text(page, list_page({title: reports for title, reports in sections.items() if reports}))
    return page


def _drawn(root: Path, folder: Path) -> tuple[str, ListedReport]:
    """Draw the report in a folder again; returns the title of its section, and what the list says of it."""

    def listed(texts: Content | tuple[str, str, str], written: Iterable[Path]) -> ListedReport:
        """Return what the list says: heading, question and verdict, and the first figure written."""
        if isinstance(texts, Content):
            texts = texts.heading, texts.question, texts.answers[0]
        heading, question, verdict = texts
        figure = next((path for path in written if path.suffix == ".svg"), None)
        return ListedReport(
            folder=folder.relative_to(root).as_posix(),
            heading=heading,
            question=question,
            verdict=verdict,
            figure=None if figure is None else figure.relative_to(root).as_posix(),
        )

    if (folder / "sweeps").is_dir():
        derived = derive(folder, experiments())
        if derived is None or derived.content is None:
            raise ConfigError(f"{folder} has no finished sweep", remedy="make accuracy measures them")
        return ACCURACY, listed(derived.content, derived.written)
    if section := SERVED.get(folder.relative_to(root).as_posix()):
        heading = re.search(r"<h1>(.*?)</h1>", (folder / PAGES["html"]).read_text(encoding="utf-8"))
        _, question, answers, *_ = (folder / PAGES["md"]).read_text(encoding="utf-8").split("\n\n", 3)
        verdict = answers.partition("\n")[0].removeprefix("- ")
        return section, listed((html.unescape(heading[1]) if heading else "", question, verdict), folder.glob("*.svg"))
    if folder.name == VALIDATION:
        validation = validate()
        written = write_validation(folder, validation)
        says = validation_content(validation)
        return ACCURACY, listed((says.heading, says.question, " ".join(says.answers[:2])), written)
    saved = load(folder)
    written = saved.declared.report.write(folder, saved.data, tuple(PAGES))
    if saved.kind == "sweep":
        compared = saved.data.comparison
        question = QUESTIONS[compared.experiment.question].question(compared)
        return SWEEPS, listed((folder.name, question, next(verdicts(compared))), written)
    section, content = CONTENTS[saved.kind]
    return section, listed(content(saved.data), written)


def main() -> int:
    options = command.parser("reports_page", __doc__)
    options.add_argument("--output", type=Path, help="an empty folder for a copy of the reports")
    output: Path | None = options.parse_args().output
    root = ROOT / "reports"

    def run() -> None:
        if output is not None:
            for path in committed(root, ""):
                target = output / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        drawn = root if output is None else output
        folders = [drawn / path.relative_to(root).parent for path in committed(root)]
        print(f"list: {write_reports(drawn, folders)}")

    return command.ended("reports_page", run)


if __name__ == "__main__":
    raise SystemExit(main())
