"""``dpsim sweep fusion-threshold``: predict, measure, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim sweep fusion-threshold
  dpsim sweep fusion-threshold --network node,paced:50us,1gbit
  dpsim sweep fusion-threshold --model cnn --global-batch 64 --output reports/cnn"""


def fusion_threshold(
    *,
    model: flags.Model = None,
    dataset: flags.DataSet = None,
    devices: flags.DevicesList = None,
    global_batch: flags.GlobalBatch = None,
    fusion_rule: flags.FusionRule = None,
    fusion_threshold: flags.Thresholds = None,
    algorithm: flags.Algorithms = None,
    overlap: Annotated[
        str | None, Parameter(help="auto (the recommended one, and one beside it), all, off, inline, poll or thread.")
    ] = None,
    network: flags.Networks = None,
    seed: flags.Seed = None,
    wire_dtype: flags.WireDtype = None,
    budget: Annotated[str | None, Parameter(help="Time to measure for, like 60s.")] = None,
    experiment: Annotated[Path | None, Parameter(help="A declared experiment (.toml); flags override it.")] = None,
    output: Annotated[Path | None, Parameter(help="Folder of the report [reports/NAME, or the next free].")] = None,
    json: flags.Json = False,
) -> None:
    """Which fusion threshold makes a step fastest, and does the model know it?

    Profiles the model and calibrates the network, writes predictions down, and
    only then measures, all settings interleaved, in random order. The folder
    gets a page to open: index.html.
    """
    import msgspec

    from dpsim.harness.sweep import declared, free_folder, sweep
    from dpsim.record import read_experiment
    from dpsim.report.comparison import points_json, summary_json
    from dpsim.report.terminal import table
    from dpsim.units import parse_duration, parse_size

    flags.writable(output, folder=True)
    base = declared("fusion_threshold") if experiment is None else read_experiment(experiment)
    chosen: dict[str, Any] = flags.given(
        model=model,
        dataset=dataset,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        networks=flags.networks(network),
        fusion_rule=fusion_rule,
        fusion_thresholds_bytes=flags.listed("--fusion-threshold", fusion_threshold, parse_size),
        global_batch=global_batch,
        algorithms=flags.listed("--algorithm", algorithm, str),
        overlap=overlap,
        seed=seed,
        wire_dtype=wire_dtype,
        budget_s=None if budget is None else parse_duration(budget),
    )
    asked = msgspec.structs.replace(base, **chosen)
    folder = output if output is not None else free_folder(Path("reports"), asked)
    with show.progress() as tell:
        comparison = sweep(asked, folder, tell)
    if json:
        show.as_json("sweep fusion-threshold", points_json(comparison), summary_json(comparison))
        return
    show.rich(table(comparison))
    print(f"report: {folder / 'index.html'}")
