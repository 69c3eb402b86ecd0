"""``dpsim sweep fusion-threshold`` and ``dpsim sweep devices``: predict, measure, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.comparison import Comparison
    from dpsim.records.sweep import Experiment

EXAMPLES = """\
Examples:
  dpsim sweep fusion-threshold
  dpsim sweep fusion-threshold --network node,paced:50us,1gbit
  dpsim sweep fusion-threshold --model cnn --global-batch 64 --output reports/cnn"""
DEVICES_EXAMPLES = """\
Examples:
  dpsim sweep devices --model cnn --devices 1,2 --global-batch 128
  dpsim sweep devices --batch-norm global --network node,paced:50us,1gbit
  dpsim sweep devices --reproducible --steps 100 --output reports/same-bits
  dpsim sweep devices --scaling weak --local-batch 64"""

_Overlap = Annotated[
    str | None,
    Parameter(help="auto: measure the predicted-best mode and one alternative; or all, off, inline, poll, thread."),
]
_OverlapOfAll = Annotated[
    str | None,
    Parameter(name="--overlap", help="auto: measure the predicted-best mode; or all, off, inline, poll, thread."),
]
_Budget = Annotated[str | None, Parameter(help="Time to measure for, like 60s; to calibrate as much, 12s at most.")]
_Declared = Annotated[Path | None, Parameter(help="A declared experiment (.toml); flags override it.")]
_Folder = Annotated[Path | None, Parameter(help="Folder of the report [reports/NAME, or the next free].")]


def fusion_threshold(
    *,
    model: flags.Model = None,
    dataset: flags.DataSet = None,
    devices: flags.DevicesList = None,
    global_batch: flags.GlobalBatch = None,
    fusion_rule: flags.FusionRule = None,
    fusion_threshold: flags.Thresholds = None,
    algorithm: flags.Algorithms = None,
    overlap: _Overlap = None,
    network: flags.Networks = None,
    seed: flags.Seed = None,
    wire_dtype: flags.WireDtype = None,
    budget: _Budget = None,
    experiment: _Declared = None,
    output: _Folder = None,
    json: flags.Json = False,
) -> None:
    """Which fusion threshold makes a step fastest, and does the model know it?

    Profiles the model and calibrates the network, writes predictions down, and
    only then measures, all settings interleaved, in random order. The folder
    gets a page to open: index.html.
    """
    import msgspec

    from dpsim.errors import ConfigError

    flags.writable(output, folder=True)
    base = _declared("fusion_threshold", experiment)
    if base.scaling is not None:
        raise ConfigError(
            f"the experiment {base.name} has [scaling]: it is a sweep over the number of devices",
            allowed="an experiment without [scaling]",
            remedy="run it with dpsim sweep devices",
        )
    chosen: dict[str, Any] = flags.given(
        model=model,
        dataset=dataset,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        networks=flags.networks(network),
        fusion_rule=fusion_rule,
        fusion_thresholds_bytes=flags.listed("--fusion-threshold", fusion_threshold, flags.threshold),
        global_batch=global_batch,
        algorithms=flags.listed("--algorithm", algorithm, str),
        overlap=overlap,
        seed=seed,
        wire_dtype=wire_dtype,
        budget_s=flags.budget(budget),
    )
    _swept(msgspec.structs.replace(base, **chosen), output, json=json, command="sweep fusion-threshold")


def devices(
    *,
    model: flags.Model = None,
    dataset: flags.DataSet = None,
    devices: flags.DevicesList = None,
    global_batch: flags.GlobalBatch = None,
    fusion_rule: flags.FusionRule = None,
    fusion_threshold: flags.Threshold = None,
    algorithm: flags.Algorithms = None,
    overlap: _OverlapOfAll = None,
    network: flags.Networks = None,
    seed: flags.Seed = None,
    wire_dtype: flags.WireDtype = None,
    batch_norm: flags.BatchNorm = None,
    reproducible: flags.Reproducible = None,
    leaves: flags.Leaves = None,
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        Parameter(help="strong (one global batch for all), or weak (one local batch)."),
    ] = None,
    local_batch: Annotated[int | None, Parameter(help="Samples per step on each device, under weak scaling.")] = None,
    steps: Annotated[int | None, Parameter(help="Steps to train each device count for, to see the drift (50).")] = None,
    budget: _Budget = None,
    experiment: _Declared = None,
    output: _Folder = None,
    json: flags.Json = False,
) -> int:
    """How fast is training on more devices, and is it still the same training?

    Predicts, then measures the step on each number of devices, all interleaved,
    and then trains on each to see how far the parameters drift from one device.
    Exits with 1 where bits that should be the same are not.
    """
    import msgspec

    from dpsim.plan import DEFAULT_LEAVES
    from dpsim.records.sweep import Scaling

    flags.writable(output, folder=True)
    base = _declared("devices", experiment)
    flags.reproducible_leaves(reproducible, leaves)
    if reproducible and leaves is None:
        leaves = DEFAULT_LEAVES
    over: dict[str, Any] = flags.given(kind=scaling, batch_norm=batch_norm, leaves=leaves, steps=steps)
    if leaves is not None and batch_norm is None:
        over["batch_norm"] = None  # the usual one
    chosen: dict[str, Any] = flags.given(
        model=model,
        dataset=dataset,
        devices=flags.listed("--devices", devices, flags.devices_or_layout),
        networks=flags.networks(network),
        fusion_rule=fusion_rule,
        fusion_thresholds_bytes=None if fusion_threshold is None else (flags.threshold(fusion_threshold),),
        global_batch=global_batch,
        algorithms=flags.listed("--algorithm", algorithm, str),
        overlap=overlap,
        seed=seed,
        wire_dtype=wire_dtype,
        budget_s=flags.budget(budget),
    )
    chosen["scaling"] = msgspec.structs.replace(base.scaling or Scaling(), **over)
    if local_batch is not None:
        chosen["global_batch"] = _of_one_device(local_batch, global_batch, weak=chosen["scaling"].kind == "weak")
    asked = msgspec.structs.replace(base, **chosen)
    comparison = _swept(asked, output, json=json, command="sweep devices")
    return 1 if comparison.identical is False else 0


def _of_one_device(local_batch: int, global_batch: int | None, *, weak: bool) -> int:
    from dpsim.errors import ConfigError

    if not weak or global_batch is not None:
        given = "under strong scaling" if not weak else f"and --global-batch {global_batch}"
        raise ConfigError(
            f"--local-batch {local_batch} {given}",
            allowed="--local-batch with --scaling weak, --global-batch without",
            remedy="give one of the two",
        )
    return local_batch


def _declared(name: str, given: Path | None) -> Experiment:
    from dpsim.harness.sweep.sweep import declared
    from dpsim.records.sweep import read_experiment

    return declared(name) if given is None else read_experiment(given)


def _swept(asked: Experiment, output: Path | None, *, json: bool, command: str) -> Comparison:
    """Run a sweep and show what it came to."""
    from dpsim.harness.sweep.sweep import free_folder, sweep
    from dpsim.records.comparison import points_json, summary_json
    from dpsim.report.sweep.terminal import table

    folder = output if output is not None else free_folder(Path("reports"), asked)
    with show.progress() as tell:
        comparison = sweep(asked, folder, tell)
    if json:
        show.as_json(command, points_json(comparison), summary_json(comparison))
    else:
        show.rich(table(comparison))
        print(f"report: {folder / 'index.html'}")
    return comparison
