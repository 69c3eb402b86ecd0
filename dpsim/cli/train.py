"""``dpsim train``: real training on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import flags, readers, show

if TYPE_CHECKING:
    from dpsim.records.train import TrainConfig, TrainResult

EXAMPLES = """\
Examples:
  dpsim train --model cnn --devices 2 --global-batch 64 --epochs 5
  dpsim train --model mlp:512,256 --fusion-threshold 1MiB --json
  dpsim train --optimizer adamw --schedule cosine --set warmup_epochs=2
  dpsim train --optimizer lars --global-batch 256 --learning-rate 2
  dpsim train --checkpoint run1 --checkpoint-every 100
  dpsim train --resume run1
  dpsim train --model own.py:network --devices 2
  dpsim train --devices 2 --reproducible --set leaves=16
  dpsim train --devices 2 --reproducible --checkpoint run2 --elastic
  dpsim train --devices 2 --strategy zero1 --optimizer adamw
  dpsim train --devices 2 --strategy parameter-server --record order.json
  dpsim train --replay order.json
  mpiexec -n 2 dpsim train --devices 2"""
SHOWN = (
    "--model --dataset --devices --global-batch --epochs --steps --optimizer --learning-rate --strategy "
    "--fusion-threshold --algorithm --network --reproducible --checkpoint --json"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""


class RunFlags(
    flags.Flags,
    of="model dataset devices global_batch accumulate fusion_rule fusion_threshold_bytes algorithm network steps epochs"
    " seed checkpoint_every backend batch_norm elastic strategy record replay optimizer learning_rate",
    by_set="cycle_s overlap wire_dtype compute_dtype leaves label_smoothing momentum weight_decay nesterov"
    " trust_coefficient warmup_epochs reference_batch",
):
    """The flags that set fields of ``TrainConfig``, of its optimizer and of its schedule."""

    reproducible: flags.Reproducible = None


_RUN = RunFlags()


def train(
    *,
    run: RunFlags = _RUN,
    schedule: flags.RateDecay = None,
    checkpoint: flags.CheckpointFolder = None,
    resume: flags.Resume = None,
    output: Annotated[Path | None, Parameter(help="Also write the result, with every loss, to this file.")] = None,
    stall_after: flags.StallAfter = None,
    hostfile: flags.Hostfile = None,
    json: flags.Json = False,
) -> None:
    """Train a model with data parallelism; every number is measured.

    Without flags: model cnn on digits, 1 device, global batch 64, 20 epochs,
    seed 0, fusion rule tarantella with a threshold of 32 KiB, overlap off, SGD
    with momentum.
    """
    from dpsim import codec
    from dpsim.errors import DpsimError
    from dpsim.harness.train import train as harness
    from dpsim.harness.train.resume import configured
    from dpsim.launch import hosts
    from dpsim.learning_rate import RateSchedule, parse_decay
    from dpsim.optimizer import AdamW, Lars, Sgd
    from dpsim.records.train import recorded

    flags.writable(output, "output")
    flags.writable(checkpoint, folders=("checkpoints",), flag="--checkpoint")
    fields = run.values()
    flags.writable(Path(fields["record"]) if "record" in fields else None, "updates", flag="--record")
    fields |= readers.provided(checkpoint=None if checkpoint is None else str(checkpoint), stall_after_s=stall_after)
    rate = readers.taken(fields, RateSchedule)
    rate |= readers.provided(decay=None if schedule is None else parse_decay(schedule))
    optimizer, settings = fields.pop("optimizer", None), readers.taken(fields, Sgd, AdamW, Lars)
    with hosts.hostfile(hostfile), show.progress() as progress:
        config = configured(resume, fields, optimizer, settings, rate, progress)
        result = harness.train(config, progress)
    if output is not None:
        codec.write(output, recorded(config, result))
    if json:
        summary = codec.to_builtins(result)
        point = codec.to_builtins(config.fields) | _UNUSED | {"losses": summary.pop("losses", [])}
        show.print_json("train", [point], summary)
    else:
        _print(config, result)
    if result.checkpoint_failure:
        raise DpsimError(result.checkpoint_failure)


_UNUSED = {"workload": None, "link_alpha_s": 0.0, "link_beta_s_per_byte": 0.0}
"""Fields of a point that always have these values."""


def _print(config: TrainConfig, result: TrainResult) -> None:
    from dpsim.fusion_rules import FUSION_RULES
    from dpsim.units import format_duration, format_size

    plan = config.plan
    print(f"{config.model} on {config.dataset}, {show.count_devices(plan.devices)}, global batch {plan.global_batch},")
    fusion = f"fusion rule {plan.fusion_rule}"
    if FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is not None:
        fusion += f" at {format_size(plan.threshold_bytes)}"
    print(
        f"seed {config.seed}, {fusion}, algorithm {plan.algorithm}, overlap {config.fields['overlap']}, "
        f"{type(plan.optimizer).__name__} at learning rate {plan.optimizer.learning_rate:g}"
    )
    test_loss = "" if result.test_loss is None else f"test loss {result.test_loss:.4g}, "
    print(f"test accuracy {result.test_accuracy:.2%}, {test_loss}final loss {result.final_loss:.4g}")
    run = f"{result.steps} steps, {show.count_devices(result.devices)}"
    if result.first_step == result.steps:
        print(f"{run}, all of them trained before")
    else:
        print(f"{result.images_per_s:,.0f} images/s, {format_duration(result.step_s)} per step, {run}")
    if plan.parallelism.sharded:
        print(f"strategy {plan.strategy}: {format_size(result.optimizer_state_bytes)} of optimizer state a device")
    if result.consensus_distance:
        apart = f"{result.consensus_distance:.2%} of their norm apart when a worker averages them"
        print(f"strategy {plan.strategy}: copies of the parameters are {apart}")
    if plan.compute_dtype != "float32":
        print(f"operands of products and convolutions in {plan.compute_dtype}, sums and parameters in float32")
    if result.gpus:
        shared = f", shared by {result.devices} ranks" if result.gpus < result.devices else ""
        path = f"; gradients: {result.gpu_path}" if result.gpu_path else ""
        print(f"{result.gpus} GPU{'s' if result.gpus > 1 else ''}{shared}{path}")
    print(f"digest of the parameters {result.digest}")
    if result.libraries:
        print(f"{result.computed_on}: {result.libraries}")
