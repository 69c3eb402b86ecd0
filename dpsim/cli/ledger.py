"""What commands do with the ledger: keep what was predicted, and say how right it was of what was measured."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.cli import flags, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.model.ledger import Scored
    from dpsim.model.rows import PredictedRow
    from dpsim.records.comparison import SweepData

_FOLDER = Path("reports/ledger")


def keep(command: str, rows: Iterable[PredictedRow], inputs: Mapping[str, object]) -> None:
    """Keep what a command line predicted from these inputs; the first time, say where, and how to end it."""
    from dpsim.dates import stamp
    from dpsim.model import ledger, past

    place = past.folder()
    first = place is not None and not (place / past.FILE).exists()
    file = ledger.keep(command, rows, stamp(), inputs)
    if file is not None and first:
        print(
            f"dpsim: predictions are kept in {file}, to say how right they were once a job runs; nothing is sent\n"
            f"  to do:   nothing; {ledger.VARIABLE}=off ends it (docs/ledger.md)",
            file=sys.stderr,
        )


def scored_sweep(swept: SweepData) -> Scored:
    """Score the settings of a sweep that were predicted before it."""
    from dpsim.dates import stamp
    from dpsim.harness.sweep.runs import runs_of
    from dpsim.model.ledger import Scored, on, score

    return score(runs_of(swept), stamp()) if on() else Scored()


def show_ledger(output: Path | None, share: Path | None, *, json: bool) -> None:
    """Write the page of the ledger, or the file to share, and print what they say. Raises ``ConfigError``."""
    from dpsim import codec
    from dpsim.folder_lock import locked
    from dpsim.model import past
    from dpsim.report import ledger as report
    from dpsim.report.terminal import TerminalReport

    folder = output or _FOLDER
    if share is not None:
        flags.writable(share, "ledger", flag="--share")
    else:
        flags.writable(folder, folders=("report",))
    kept = past.read()
    if not (kept.predictions or kept.scores or kept.damaged or kept.foreign):
        raise ConfigError(
            f"there is no ledger in {past.folder()}",
            allowed="one that dpsim predict, dpsim tune or a page has written",
            remedy="predict a job, then run it with dpsim explain or dpsim sweep; in CI, and with DPSIM_LEDGER=off,"
            " nothing is kept",
        )
    if share is not None:
        codec.write(share, report.shared(kept))
    else:
        with locked(folder):
            report.write(folder, kept)
    if json:
        show.print_json("report", report.shared(kept)["scores"], {"sentences": report.lines(kept)})
        return
    tables = [each for each in (report.scores_table(kept), report.waiting_table(kept)) if each.sections[0].rows]
    show.rich(TerminalReport(tables=tables))
    for sentence in report.lines(kept):
        print(sentence)
    print(f"Shared without names: {share}" if share is not None else f"Open  {folder / 'index.html'}")


def as_record(scored: Scored | None) -> dict[str, Any]:
    """Return what a summary of ``--json`` says of the ledger: nothing where nothing was predicted."""
    from dpsim.report.ledger import record

    return {"ledger": record(scored)} if scored is not None and (scored.scores or scored.unscored) else {}


def print_scored(scored: Scored | None) -> None:
    """Print the line of the ledger, if there is one."""
    from dpsim.report.ledger import sentences

    for sentence in sentences(scored) if scored is not None else ():
        print(sentence)
