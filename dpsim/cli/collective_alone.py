"""``dpsim predict --collective``: what collectives cost alone, from a machine file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.cli import outputs, show
from dpsim.cli.find import refuse_beside
from dpsim.errors import ConfigError, unknown

if TYPE_CHECKING:
    from dpsim.model.alone import AloneKind

_EXAMPLE = "write it like --collective allreduce --size 1MiB,64MiB --devices 8,2x8 --machine FILE"


def predict_collectives(
    texts: Mapping[str, str | None],
    algorithms: str | None,
    output: Path | None,
    plot: Path | None,
    given: Sequence[str],
    *,
    json: bool,
) -> None:
    """Print the price of each collective, size, number of devices and algorithm.

    ``texts`` are those of the flags ``collective``, ``size``, ``devices`` and ``machine``, and ``given`` are the other
    flags. Raises ``ConfigError`` for those that say nothing of a collective.
    """
    from dpsim import machine as machines
    from dpsim.cli import readers
    from dpsim.collective import Collective, parse_devices
    from dpsim.model.alone import predict_alone
    from dpsim.model.defaults import for_prediction
    from dpsim.model.message import message
    from dpsim.model.points import default_algorithm
    from dpsim.report.collective_alone import collectives_chart, columns, record
    from dpsim.report.words import interval_sentence

    taken = ("--algorithm", "--output", "--plot", "--json")
    refuse_beside("--collective", {flag: flag for flag in given if flag not in taken})
    for name, text in texts.items():
        if text is None:
            raise ConfigError(f"a collective alone without --{name}", allowed="all four", remedy=_EXAMPLE)
    kinds, sizes = (str(texts[name]).split(",") for name in ("collective", "size"))
    machine = for_prediction(message(4), machines.read(str(texts["machine"])))
    outputs.writable(output, "output")
    rows = []
    for kind, count, algorithm, size in itertools.product(
        [_kind(text) for text in kinds],
        readers.counts_or_layouts(str(texts["devices"])),
        (algorithms or default_algorithm(machine)).split(","),
        [_size(text) for text in sizes],
    ):
        devices, layout = parse_devices(count)
        if devices == 1:
            raise ConfigError("a collective on one device", allowed="2 devices or more, or a layout such as 2x8")
        collective = Collective(kind=kind, algorithm=algorithm, devices=devices, layout=layout)
        rows.append(predict_alone(machine, collective, size))
    clusters = min(row.clusters for row in rows)
    summary = {"machine": str(texts["machine"]), "interval_level": None, "interval_clusters": clusters}
    if show.as_json("predict", [record(row) for row in rows], summary, output, json=json):
        return
    show.table(columns(), rows, title=f"Collectives alone on {machine.name}")
    print(f"Note: {interval_sentence(None, 0, clusters)}.")
    if plot is not None:
        outputs.draw_plot(plot, collectives_chart(rows))
        print(f"plot: {plot}")


def _kind(text: str) -> AloneKind:
    from dpsim.model.alone import KINDS

    for kind in KINDS:
        if kind == text:
            return kind
    raise unknown("collective", text, KINDS)


def _size(text: str) -> int:
    from dpsim.units import parse_size

    size = parse_size(text)
    if not 4 <= size < 2**63 or size % 4:
        raise ConfigError(f"--size {text}", allowed="whole float32 numbers: 4 bytes or more, such as 64KiB or 1GiB")
    return int(size)
