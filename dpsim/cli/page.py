"""``dpsim predict --page``: the page with sliders."""

from __future__ import annotations

from pathlib import Path

from dpsim.cli import flags, ledger, readers
from dpsim.errors import ConfigError


def write_page(page: Path, workload: Path | None, machine: str | None, devices: str | None, others: list[str]) -> None:
    """Write the page with sliders. Raises ``ConfigError`` for flags that it has no use for."""
    import shlex

    from dpsim import machine as machines
    from dpsim import workload as workloads
    from dpsim.codec import write_text
    from dpsim.explore import page as pages
    from dpsim.explore.world import EXAMPLE_MACHINE, EXAMPLE_WORKLOAD
    from dpsim.model.defaults import for_prediction
    from dpsim.model.points import predict_grid
    from dpsim.setting import Grid

    if others:
        names = ", ".join(others)
        raise ConfigError(f"{names} with --page", remedy=f"leave {names} out: the page has a slider for each setting")
    inputs = [path for path in (workload, machine and Path(machine)) if path]
    flags.writable(page, "page", flag="--page", inputs=inputs)
    file, name = workload or EXAMPLE_WORKLOAD, machine or EXAMPLE_MACHINE
    begin = readers.provided(devices=devices and readers.devices_or_layout(devices))
    files = shlex.join(["--workload", str(file), "--machine", name])
    read, read_machine = workloads.read(file), machines.read(name)
    write_text(page, pages.page(read, read_machine, files, **begin))
    grid = Grid.of(devices=begin.get("devices", pages.DEVICES))
    begun = predict_grid(read, for_prediction(read, read_machine), grid)
    ledger.keep("page", begun.rows, {"workload": read, "machine": read_machine})
    print(f"Open  {page}")
