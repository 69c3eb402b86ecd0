"""``dpsim predict --rank``: which strategy pays, and which fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpsim.cli import flags, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.workload import Workload

_RANKED = ["--local-batch", "--accumulate", "--fusion-threshold", "--cycle", "--overlap", "--strategy"]
"""The flags of what is tried out, or follows from it."""


class RankFlags(flags.Flags, group="Rank strategies"):
    """The flags of a ranking."""

    rank: Literal["strategy"] | None = flags.flag(
        "Price each strategy with its settings, micro-batches, fusion thresholds and overlaps at one global batch, and "
        "show the best of each, the fastest first."
    )
    memory: str | None = flags.flag(
        "With --rank: memory of a device, like 16GiB (the machine file's memory_bytes): say which plans fit."
    )
    all: bool = flags.flag("With --rank: show every plan that is compared.", default=False)


def rank(
    of: RankFlags,
    workload: Workload,
    machines: Mapping[str, Machine],
    devices: tuple[int | str, ...],
    settings: dict[str, Any],
    output: Path | None,
    *,
    json: bool,
) -> None:
    """Rank the strategies and print what comes of it; the JSON goes into ``output`` too. Raises ``ConfigError``."""
    import msgspec

    from dpsim import codec
    from dpsim.model.advise import advise
    from dpsim.model.cautions import cautions
    from dpsim.report import advice as report
    from dpsim.report.words import interval_sentence
    from dpsim.setting import Grid

    lists = {"machine": tuple(machines), "devices": devices} | settings
    for name, values in lists.items():
        if flags.flag_of(name) in _RANKED:
            given = f"{flags.flag_of(name)} with --rank strategy, which tries them out"
            raise ConfigError(given, remedy=f"leave {flags.flag_of(name)} out, or --rank")
        if isinstance(values, tuple) and len(values) != 1:
            text = ",".join(map(str, values))
            raise ConfigError(f"{flags.flag_of(name)} {text} with --rank strategy", allowed="one of them")
    known = next(iter(machines.values()))
    if of.memory is not None:
        known = msgspec.structs.replace(known, memory_bytes=flags.memory(of.memory))
    one = {name: values[0] if isinstance(values, tuple) else values for name, values in settings.items()}
    advice = advise(workload, known, Grid.of(devices=devices[0], **one), every=of.all)
    points, summary = report.records(advice, every=of.all), report.summary(advice, workload)
    notes = [*advice.script.unpriced, *cautions(known, [row.plan for row in advice.choices], workload)]
    shown = show.json_object("advise", points, summary | {"cautions": notes}) if json or output is not None else {}
    if output is not None:
        codec.write(output, shown)
    if json:
        print(codec.to_json(shown))
        return
    if sentence := report.nothing_fits(advice):
        print(sentence)
    batch = advice.plain.plan.global_batch
    show.table(report.columns(advice), points, title=f"{workload.name} on {devices[0]} devices, global batch {batch}")
    for sentence in report.sentences(advice, workload):
        print(sentence)
    predicted = advice.choices[0].prediction
    interval = interval_sentence(predicted.interval_level, predicted.interval_studies)
    for sentence in [interval, *filter(None, [advice.script.sentence]), *notes]:
        print(f"Note: {sentence}.")
