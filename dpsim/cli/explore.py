"""``dpsim explore``: a page with sliders, on which the model of ``dpsim predict`` runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dpsim.cli import flags

EXAMPLES = """\
Examples:
  dpsim explore
  dpsim explore --workload w.json --machine 25gbe --output meeting.html
  dpsim explore --workload w.json --machine nvlink3-8gpu+hdr-ib
    --devices 4x8
  dpsim explore reports/strategies"""


def explore(
    study: Annotated[
        Path | None, Parameter(name="STUDY", help="Folder of a sweep: what it profiled, calibrated and measured.")
    ] = None,
    /,
    *,
    workload: Annotated[Path | None, Parameter(help="A workload file from dpsim profile (GoogLeNet on K80s).")] = None,
    machine: Annotated[
        str | None, Parameter(help="A machine file from dpsim calibrate, or a name of dpsim machine list (10gbe).")
    ] = None,
    devices: Annotated[str | None, Parameter(help="Devices to begin with, or a layout such as 2x4 (8).")] = None,
    output: Annotated[Path, Parameter(help="The page to write.")] = Path("explore.html"),
) -> None:
    """Write a page on which you move sliders and see the predicted step.

    One file, which needs no server and no network: open it, send it. Its model
    is that of dpsim predict, for every strategy that makes steps together.
    """
    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.codec import write_text
    from dpsim.errors import ConfigError
    from dpsim.explore.page import page
    from dpsim.explore.studied import studied
    from dpsim.explore.world import EXAMPLE_MACHINE, EXAMPLE_WORKLOAD

    flags.writable(output, "page", inputs=tuple(path for path in (workload, machine and Path(machine)) if path))
    if study is None:
        file, name = workload or EXAMPLE_WORKLOAD, machine or EXAMPLE_MACHINE
        known, begin = (
            (workloads.read(file), machines.read(name)),
            flags.provided(devices=devices and flags.devices_or_layout(devices)),
        )
        written = page(*known, shlex.join(["--workload", str(file), "--machine", name]), **begin)
    elif workload is None and machine is None and devices is None:
        written = studied(study)
    else:
        raise ConfigError(
            f"the study {study} with --workload, --machine or --devices",
            allowed="a study, which has all of them, or the flags",
            remedy="leave one of the two out",
        )
    write_text(output, written)
    print(f"Open  {output}")
