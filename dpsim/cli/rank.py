"""``dpsim predict --rank``: which strategy pays, and which fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dpsim.cli import flags, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model.advise import Advice
    from dpsim.setting import Grid
    from dpsim.workload import Workload


class RankFlags(flags.Flags, group="Rank strategies"):
    """The flags of a ranking."""

    rank: Literal["strategy", "plan"] | None = flags.flag(
        "Price each strategy with its settings, micro-batches, fusion thresholds and overlaps at one global batch, and "
        "show the best of each, the fastest first; or every plan."
    )
    memory: str | None = flags.flag(
        "With --rank: memory of a device, like 16GiB (the machine file's memory_bytes): say which plans fit."
    )

    def is_asked(self) -> bool:
        """Return whether there is a ranking. Raises ``ConfigError`` for its flags without one."""
        if self.rank is None and (others := self.spelled(*self.given())):
            raise ConfigError(f"{others} without --rank strategy", remedy=f"leave {others} out, or add --rank strategy")
        return self.rank is not None


def rank(
    of: RankFlags,
    workload: Workload,
    machines: Mapping[str, Machine],
    grid: Grid,
    spelled: Callable[[str], str],
    output: Path | None,
    *,
    json: bool,
) -> None:
    """Rank the strategies and print what comes of it; the JSON goes into ``output`` too. Raises ``ConfigError``.

    The grid has one value of each field, which none of the plans that are compared may change.
    """
    import msgspec

    from dpsim.model.advise import advise
    from dpsim.model.cautions import cautions
    from dpsim.report import advice as report
    from dpsim.report.words import interval_sentence

    for name, values in ({"machine": tuple(machines)} | {name: grid.values(name) for name in grid.varied}).items():
        if len(values) > 1:
            text = ",".join(map(str, values))
            raise ConfigError(f"{spelled(name)} {text} with --rank strategy", allowed="one of them")
    machine = next(iter(machines.values()))
    if of.memory is not None:
        machine = msgspec.structs.replace(machine, memory_bytes=readers.memory(of.memory))
    advice = advise(workload, machine, grid, every=of.rank == "plan")
    _check_tried(advice, workload, grid, spelled)
    points, summary = report.records(advice, every=of.rank == "plan"), report.summary(advice, workload)
    notes = [*advice.script.unpriced, *cautions(machine, [row.plan for row in advice.choices], workload)]
    if show.as_json("advise", points, summary | {"cautions": notes}, output, json=json):
        return
    if sentence := report.nothing_fits(advice):
        print(sentence)
    plan = advice.plain.plan
    title = f"{workload.name} on {plan.layout or plan.devices} devices, global batch {plan.global_batch}"
    show.table(report.columns(advice), points, title=title)
    for sentence in report.sentences(advice, workload):
        print(sentence)
    predicted = advice.choices[0].prediction
    interval = interval_sentence(predicted.interval_level, predicted.interval_studies, predicted.interval_clusters)
    for sentence in [interval, *filter(None, [advice.script.sentence]), *notes]:
        print(f"Note: {sentence}.")


def _check_tried(advice: Advice, workload: Workload, grid: Grid, spelled: Callable[[str], str]) -> None:
    """Raise ``ConfigError`` for a field that is given, and has other values in the plans that were compared."""
    from dpsim.model.points import plan_one

    given, _ = plan_one(workload, advice.machine, grid)
    for name in grid.base:
        if any(getattr(row.plan, name) != getattr(given, name) for row in advice.candidates if name != "devices"):
            flag = spelled(name)
            raise ConfigError(
                f"{flag} with --rank strategy, which tries them out", remedy=f"leave {flag} out, or --rank"
            )
