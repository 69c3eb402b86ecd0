"""``dpsim profile``: measure a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim profile --model cnn --local-batch 8,16,32,64 --output w.json"""


def profile(
    *,
    model: flags.Model = None,
    dataset: flags.DataSet = None,
    local_batch: flags.LocalBatches = None,
    seed: flags.Seed = None,
    optimizer: flags.Optimizer = None,
    output: Annotated[Path, Parameter(help="The workload file to write.")] = Path("workload.json"),
    json: flags.Json = False,
) -> None:
    """Measure the layers of a model on this machine; writes a workload file."""
    import msgspec

    from dpsim import codec
    from dpsim.harness.profile import profile as harness
    from dpsim.optimizer import changed
    from dpsim.report.table import Column
    from dpsim.units import format_duration, format_size

    flags.writable(output)
    batches = flags.listed("--local-batch", local_batch, flags.whole("--local-batch"))
    fields = flags.provided(
        model=model, dataset=dataset, seed=seed, local_batches=None if batches is None else tuple(sorted(set(batches)))
    )
    config = harness.ProfileConfig(**fields)
    config = msgspec.structs.replace(config, optimizer=changed(config.optimizer, optimizer, {}))
    with show.progress() as progress:
        workload = harness.profile(config, progress)
    codec.write(output, workload)
    points = []
    for batch in workload.local_batches:
        times = workload.times(batch)
        forward_s, backward_s = float(times.forward_s.sum()), float(times.backward_s.sum())
        points.append({"local_batch": batch, "forward_s": forward_s, "backward_s": backward_s})
    if json:
        summary = {"workload": str(output), "layers": len(workload.layers), "gradient_bytes": workload.gradient_bytes}
        rest = {"tensors": len(workload.tensors), "update_s": workload.update_s, "overhead_s": workload.overhead_s}
        show.print_json("profile", points, summary | rest)
        return
    show.table(
        (
            Column(head="local batch", cell=lambda point: str(point["local_batch"])),
            Column(head="forward", cell=lambda point: format_duration(point["forward_s"])),
            Column(head="backward", cell=lambda point: format_duration(point["backward_s"])),
        ),
        points,
    )
    print(
        f"{workload.name}: {len(workload.tensors)} gradient tensors, {format_size(workload.gradient_bytes)};", end=" "
    )
    print(f"update {format_duration(workload.update_s)}")
    print(f"workload file: {output}")
