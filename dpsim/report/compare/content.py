"""What a report of compared runs says, as a page, as Markdown and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from dpsim.records.run_comparison import ComparedRun, RunComparison, RunPair
from dpsim.report.compare.tables import (
    differences_table,
    environments_table,
    means_table,
    mixed,
    not_compared_table,
    ratio_text,
    settings_table,
)
from dpsim.report.compare.warnings import one_processor, warnings
from dpsim.report.content import Card, Content, Tile
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted

_TERMINAL_ROWS = 40
_RULES = (
    "A setting is compared where both runs measured it: all fields that name it are equal.",
    "Ratios are of medians, with 95% percentile bootstrap intervals: the rounds of each run are resampled on their "
    "own, and each round as a whole, because its samples are not independent.",
    "A setting is called faster or slower where its interval does not contain 1 and its ratio differs from 1 by more "
    "than the larger A/A difference of the two runs. Of many settings that do not differ, chance may still call about "
    "one in twenty different.",
    "The interval of the geometric mean comes from the same resampled rounds for all settings of a run.",
)


def content(comparison: RunComparison) -> Content:
    """Return what the report says."""
    labels = [run.label for run in comparison.runs]
    heading = f"{', '.join(labels[1:])} against {labels[0]}"
    tables = (
        settings_table(comparison),
        means_table(comparison),
        environments_table(comparison),
        not_compared_table(comparison),
    )
    first = comparison.runs[0].declared
    subject = f", {first['model']} on {first['data set']}" if comparison.kind == "sweep" else ""
    return Content(
        name=heading,
        heading=heading,
        question=f"What changed in the time of one {comparison.quantity}{subject}, setting by setting?",
        answers=tuple(answers(comparison)),
        cards=tuple(_card(comparison, pair) for pair in comparison.pairs),
        tables=tuple(each for each in tables if each is not None),
        warnings=warnings(comparison),
        rules=_RULES,
        facts=tuple((run.label, _of_run(run)) for run in comparison.runs),
        environment=tuple((f"SHA-256 of {run.label}", run.sha256) for run in comparison.runs),
    )


def for_terminal(comparison: RunComparison) -> TerminalReport:
    """Return what ``rich.print`` shows: the settings, the means, what differs between the environments."""
    tables = [settings_table(comparison, most=_TERMINAL_ROWS), means_table(comparison)]
    differences = differences_table(comparison)
    return TerminalReport(
        tables=[*tables, differences] if differences is not None else tables,
        warnings=warnings(comparison),
        answers=tuple(answers(comparison)),
    )


def answers(comparison: RunComparison) -> Iterator[str]:
    """Yield a sentence for each run beside the first."""
    for pair in comparison.pairs:
        mean = pair.overall
        settings = counted(mean.settings, "setting")
        if mixed(comparison, pair):
            settings += " on real and emulated networks"
        if pair.same_record:
            yield f"{pair.b} is the same record as {pair.a}: the ratio is exactly 1 in all of {settings}."
            continue
        sentence = (
            f"{pair.b} takes {ratio_text(mean)} times as long as {pair.a} in the geometric mean of {settings}: "
            f"{mean.faster} faster, {mean.slower} slower, {mean.not_distinguishable} not distinguishable."
        )
        if pair.at_equal_speed is not None and pair.reference_ratio is not None and one_processor(comparison, pair):
            sentence += (
                f" The machine's own reference took {pair.reference_ratio:.3g} times as long; at equal speed the mean "
                f"is {ratio_text(pair.at_equal_speed)}."
            )
        yield sentence


def _card(comparison: RunComparison, pair: RunPair) -> Card:
    mean = pair.overall
    tiles = [
        Tile(value=f"{mean.ratio:.3g}", label=f"geometric mean of the ratios ({mean.low:.3g} to {mean.high:.3g})"),
        Tile(value=str(mean.faster), label="settings faster"),
        Tile(value=str(mean.slower), label="settings slower"),
        Tile(value=str(mean.not_distinguishable), label="settings not distinguishable"),
    ]
    if pair.at_equal_speed is not None and one_processor(comparison, pair):
        tiles.append(Tile(value=f"{pair.at_equal_speed.ratio:.3g}", label="at equal speed of the machine"))
    return Card(title=f"{pair.b} against {pair.a}", tiles=tuple(tiles))


def _of_run(run: ComparedRun) -> str:
    return f"{run.path}; {counted(run.settings, 'setting')}; measured {run.measured_from} to {run.measured_until}"
