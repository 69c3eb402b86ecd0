"""``dpsim train``: real training on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim train --model cnn --devices 2 --global-batch 64 --epochs 5
  dpsim train --model mlp:512,256 --fusion-threshold 1MiB --json
  mpiexec -n 2 dpsim train --devices 2"""


def train(
    *,
    model: flags.Model = None,
    dataset: flags.DataSet = None,
    devices: flags.Devices = None,
    global_batch: flags.GlobalBatch = None,
    accumulate: flags.Accumulate = None,
    fusion_rule: flags.FusionRule = None,
    fusion_threshold: flags.Threshold = None,
    algorithm: flags.Algorithm = None,
    overlap: flags.Overlap = None,
    wire_dtype: flags.WireDtype = None,
    network: flags.Network = None,
    steps: flags.Steps = None,
    epochs: flags.Epochs = None,
    seed: flags.Seed = None,
    learning_rate: flags.LearningRate = None,
    momentum: flags.Momentum = None,
    weight_decay: flags.WeightDecay = None,
    output: Annotated[Path | None, Parameter(help="Also write the result, with every loss, to this file.")] = None,
    json: flags.Json = False,
) -> None:
    """Train a model with data parallelism; every number is measured."""
    import msgspec

    from dpsim import codec
    from dpsim.harness import train as harness
    from dpsim.plan import Sgd
    from dpsim.units import format_duration, parse_size

    flags.writable(output)
    algorithm = flags.usual_algorithm(algorithm, network, wire_dtype)
    count, layout = (None, None) if devices is None else flags.layout(devices)
    threshold = None if fusion_threshold is None else parse_size(fusion_threshold)
    chosen: dict[str, Any] = flags.given(
        model=model, dataset=dataset, devices=count, layout=layout, global_batch=global_batch, accumulate=accumulate,
        fusion_rule=fusion_rule, fusion_threshold_bytes=threshold, algorithm=algorithm, overlap=overlap,
        wire_dtype=wire_dtype,
        network=network, steps=steps, epochs=epochs, seed=seed,
    )  # fmt: skip
    sgd: dict[str, Any] = flags.given(learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay)
    config = harness.TrainConfig(**chosen)
    config = msgspec.structs.replace(config, optimizer=Sgd(**(msgspec.structs.asdict(config.optimizer) | sgd)))
    with show.progress() as tell:
        result = harness.train(config, tell)
    if output is not None:
        codec.write(output, result)
    if json:
        summary = codec.to_builtins(result)
        show.as_json("train", [codec.to_builtins(config) | {"losses": summary.pop("losses", [])}], summary)
        return
    print(f"test accuracy {result.test_accuracy:.2%}, final loss {result.final_loss:.4g}")
    ran = f"{result.steps} steps, {show.count_devices(result.devices)}"
    print(f"{result.images_per_s:,.0f} images/s, {format_duration(result.step_s)} a step, {ran}")
    print(f"digest of the parameters {result.digest}")
