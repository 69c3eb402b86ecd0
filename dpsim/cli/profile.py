"""``dpsim profile``: a workload, of a model of dpsim's, a user's own PyTorch training, or measured steps."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.cli import flags, from_steps, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.ddp_settings import DdpSettings
    from dpsim.workload import Workload

EXAMPLES = """\
Examples:
  dpsim profile --model cnn --local-batch 8,16,32,64 --output w.json
  dpsim profile --torch-script train.py --devices 8 -- --batch-size 32
  dpsim profile --torch-script package.train --devices 2 -- --lr 0.1
  dpsim profile --torch package.module:build_model --local-batch 8,16,32
  dpsim profile --from rank0.pt.trace.json.gz --local-batch 32
  dpsim profile --workload resnet50.toml --from-steps published.csv
  dpsim profile --model cnn --from-steps devices=1,local_batch=32,step_s=20ms
    --from-steps devices=8,local_batch=32,images_per_s=9000"""
SHOWN = (
    "--model --dataset --local-batch --torch-script --torch --from --set --devices --output "
    "--json --from-steps --workload --machine --free"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""


class ModelFlags(
    flags.Flags,
    of="model dataset local_batch...",
    by_set="seed optimizer compute_dtype accumulate fusion_rule fusion_threshold_bytes cycle_s algorithm overlap"
    " batch_norm wire_dtype strategy leaves",
):
    """The flags of a model of dpsim's."""

    torch_script: str | None = flags.flag(
        "Profile what your own PyTorch script, or module as python -m takes it, trains with DistributedDataParallel or "
        "fully_shard, instead of a model here."
    )
    torch: str | None = flags.flag(
        "Profile DDP on what MODULE:FUNCTION returns: (module, batch) or (module, batch, loss) of PyTorch."
    )
    from_: Path | None = flags.flag(
        "Read the trace (.json, .json.gz) that PyTorch's profiler made of one rank of a DDP training.", name="--from"
    )
    python: flags.Python = None
    devices: int | None = flags.flag("With --torch-script, --torch: ranks that it sees (8).")
    steps: int | None = flags.flag("With --torch-script, --torch: training steps to record; then it is ended (15).")
    script_may_write: flags.ScriptMayWrite = None
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag(
        "The workload file to write (workload.json); with --from-steps a folder for it and machine.json (estimated)."
    )
    json: flags.Json = False


def profile(
    *arguments: Annotated[str, Parameter(name="ARGUMENTS", help="Arguments of the script, after --.")],
    of: ModelFlags,
    steps: from_steps.StepFlags,
) -> None:
    """Measure the layers of a model on this machine; writes a workload file.

    With --torch-script your own PyTorch script runs, unchanged, as rank 0 of
    --devices ranks in one process. The other ranks appear to hold its values.
    --local-batch then replaces the batch size of its data loaders. With --from
    nothing runs, and --local-batch says what the trace was recorded with.
    With --from-steps layer times and a machine are fitted to steps that were
    measured elsewhere; what these do not tell is refused.
    """
    from dpsim import codec

    if steps.from_steps:
        _fit(of, steps, arguments)
        return
    _refuse(steps.given(), "without --from-steps", "leave them out, or give the steps that were measured")
    output = of.output or Path("workload.json")
    flags.writable(output, "workload", inputs=(of.from_,))
    workload = _profiled(of, arguments)
    codec.write(output, workload)
    _print(workload, output, json=of.json)


def _profiled(of: ModelFlags, arguments: tuple[str, ...]) -> Workload:
    """Return the workload that is measured, or read from a trace. Raises ``ConfigError``."""
    from dpsim.launch.job_python import job_python
    from dpsim.launch.user_program import check_program
    from dpsim.torch.script.profile_script import profile_script
    from dpsim.torch.script.request import ScriptRequest

    sources = readers.provided(torch_script=of.torch_script, torch=of.torch, from_=of.from_)
    of_model = of.values()
    of_steps = {name: of_model[name] for name in of_model if name in of.by_set and name not in _OF_A_MODEL}
    _refuse(of_steps, "without --from-steps", "leave them out, or give the steps that were measured")
    local_batches = of_model.pop("local_batch", ())
    of_script = readers.provided(
        arguments=arguments or None, devices=of.devices, steps=of.steps, script_may_write=of.script_may_write
    )
    named_python = readers.provided(python=of.python)
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(map(_flag, sources))}", allowed="one of them")
    if not sources:
        _refuse(of_script | named_python, "without --torch-script", "name the script, or leave them out")
        return _of_model(of_model, local_batches, of.wait_until_quiet)
    if of.from_ is not None:
        unused = of_model | of_script | named_python | readers.provided(wait_until_quiet=of.wait_until_quiet)
        _refuse(unused, "with --from", "leave them out: the trace says what it was recorded of")
        return _of_trace(of.from_, local_batches)
    (source,) = map(_flag, sources)
    _refuse(of_model, f"with {source}", "leave them out: the model, its data and optimizer are your own")
    request = ScriptRequest(script=of.torch_script or "", function=of.torch or "", **({"devices": 8} | of_script))
    if request.script:
        check_program(request.script)
    by = job_python(of.python)
    by.tell(request.name)
    with show.measuring(of.wait_until_quiet):
        return profile_script(request, local_batches, by=by)


_SHAPES = ("model", "dataset")
_OF_A_MODEL = ("seed", "optimizer", "compute_dtype")
"""The fields of ``--set`` with which a model is profiled; the others are those of measured steps."""


def _fit(of: ModelFlags, steps: from_steps.StepFlags, arguments: tuple[str, ...]) -> None:
    """Fit a workload of these shapes, and a machine, to measured steps. Raises ``ConfigError``."""
    from dpsim import workload as workloads
    from dpsim.study.profile import ProfileConfig, bare_workload

    named = of.values()
    common = {name: named.pop(name) for name in of.by_set if name in named and name not in _OF_A_MODEL}
    scripts = readers.provided(torch_script=of.torch_script, torch=of.torch)
    sources = readers.provided(model=named.get("model"), workload=steps.workload, from_=of.from_) | scripts
    if len(sources) != 1 or of.from_ is not None:
        given = f"--from-steps with {' and '.join(map(_flag, sources)) or 'no workload'}"
        raise ConfigError(given, allowed="one of --model, --workload and --torch-script")
    if "dataset" in named and "model" not in named:
        raise ConfigError("--dataset without --model", remedy="leave --dataset out: the workload has its own shapes")
    unused = {name: value for name, value in named.items() if name not in _SHAPES}
    if not scripts:
        unused |= readers.provided(arguments=arguments or None, devices=of.devices, steps=of.steps, python=of.python)
        unused |= readers.provided(script_may_write=of.script_may_write, wait_until_quiet=of.wait_until_quiet)
    _refuse(unused, "with --from-steps", "leave them out: nothing is profiled")

    def workload() -> Workload:
        if steps.workload is not None:
            return workloads.read(steps.workload)
        return _profiled(of, arguments) if scripts else bare_workload(ProfileConfig(**named))

    inputs = [path for path in (steps.workload, of.torch_script and Path(of.torch_script)) if path]
    from_steps.fit(steps, common, workload, of.output or Path("estimated"), inputs, json=of.json)


def _flag(name: str) -> str:
    return "ARGUMENTS" if name == "arguments" else ModelFlags.spelled(name.strip("_"))


def _refuse(unused: dict[str, Any], reason: str, remedy: str) -> None:
    if unused:
        raise ConfigError(f"{', '.join(map(_flag, unused))} {reason}", remedy=remedy)


def _of_model(given: dict[str, Any], local_batches: tuple[int, ...], wait: str | None) -> Workload:
    import msgspec

    from dpsim.optimizer import changed
    from dpsim.plan import Plan
    from dpsim.study import profile as study

    plan = study.ProfileConfig().plan
    given["optimizer"] = changed(plan.optimizer, given.get("optimizer"), {})
    computation = {name: given.pop(name) for name in Plan.__struct_fields__ if name in given}
    if local_batches:
        given["local_batches"] = tuple(sorted(set(local_batches)))
    config = study.ProfileConfig(**given, plan=msgspec.structs.replace(plan, **computation))
    with show.measuring(wait) as progress:
        return study.profile(config, progress)


def _of_trace(path: Path, local_batches: tuple[int, ...]) -> Workload:
    from dpsim.torch.script.kineto.ranks import traced_steps
    from dpsim.torch.script.kineto.workload import read_trace

    if len(local_batches) != 1:
        if path.is_file():
            traced_steps(path)  # a trace that no batch helps is refused first
        batches = ",".join(map(str, local_batches))
        raise ConfigError(
            f"--from with --local-batch {batches}" if batches else "--from without --local-batch",
            allowed="the number of samples that each rank trained on at once: --local-batch 32",
            remedy="the trace does not say it, and its times are of one batch",
        )
    return read_trace(path, local_batches[0])


def _print(workload: Workload, output: Path, *, json: bool) -> None:
    from dpsim import codec
    from dpsim.report.table import Column
    from dpsim.units import format_duration, format_size

    points = []
    for batch in workload.local_batches:
        times = workload.times(batch)
        forward_s, backward_s = float(times.forward_s.sum()), float(times.backward_s.sum())
        points.append({"local_batch": batch, "forward_s": forward_s, "backward_s": backward_s})
    if json:
        summary = {"workload": str(output), "layers": len(workload.layers), "gradient_bytes": workload.gradient_bytes}
        rest = {"tensors": len(workload.tensors), "update_s": workload.update_s, "overhead_s": workload.overhead_s}
        ddp = {} if workload.ddp is None else {"ddp": codec.to_builtins(workload.ddp)}
        show.print_json("profile", points, summary | rest | ddp)
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
    if workload.ddp is not None:
        _print_ddp(workload, workload.ddp, output)


def _print_ddp(workload: Workload, ddp: DdpSettings, output: Path) -> None:
    """How DDP sends the gradients, or FSDP the parameters too, and the command that predicts such a training."""
    from dpsim.model.deferring import gain_of_deferring
    from dpsim.model.points import plan_one
    from dpsim.model.two_steps import ANY_LINK
    from dpsim.setting import Grid
    from dpsim.units import format_size

    sizes = ", ".join(map(format_size, ddp.bucket_bytes[:5])) + (", ..." if len(ddp.bucket_bytes) > 5 else "")
    own, gathered, reduced = (
        " and ".join(sorted({getattr(each, name) for each in workload.tensors}))
        for name in ("dtype", "gathered", "reduced")
    )
    plural = "s" if len(ddp.bucket_bytes) > 1 else ""
    if ddp.units:
        kept_units = sum(not unit.reshard for unit in ddp.units)
        print(
            f"FSDP gathers {len(ddp.units)} unit{plural}{f' in each of {ddp.replicas} replicas' * (ddp.replicas > 1)},"
            f" {kept_units} of them once a step (last unit first): {sizes}"
        )
        if {own, gathered, reduced} != {own}:
            print(f"parameters of {own} are gathered as {gathered}, and their gradients reduced as {reduced}")
    else:
        of_type = "" if own == "float32" else f" of {own}"
        print(f"DDP sends {len(ddp.bucket_bytes)} bucket{plural}{of_type}: {sizes}")
    if ddp.whole_buckets:
        print("what is in them is not known, so they cannot be divided: record the trace with record_shapes=True")
    if ddp.wire_dtype is not None:
        print(f"communication hook {ddp.communication_hook}: gradients are sent as {ddp.wire_dtype}")
    if ddp.own_allreduce_bytes:
        print(f"Note: the script asks for {ddp.own_allreduces} of its own in each step, which predictions contain.")
    if ddp.recomputes:
        again_s, backward_s = (
            sum(sum(times) for layer in workload.layers if (times := getattr(layer, name)))
            for name in ("recompute_s", "backward_s")
        )
        print(
            f"activation checkpointing: {again_s / backward_s:.0%} of backward computes forward again; dpsim predict"
            " --assume recompute=none says what it takes without"
        )
    for sentence in ddp.unpriced():
        print(f"Note: {sentence}.")
    if not ddp.deferred:
        plan, _ = plan_one(workload, ANY_LINK, Grid.of(devices=ddp.devices))
        if gain := gain_of_deferring(workload, ANY_LINK, plan, priced=False):
            print(f"Note: {gain}; dpsim predict says how long that takes.")
    print(
        f"a machine file is made by: dpsim calibrate --algorithm gloo --devices {max(ddp.devices, 2)} (this machine's"
        " processors), or dpsim calibrate --from LOG (of nccl-tests, OSU or IMB)"
    )
    batches = ",".join(map(str, workload.local_batches))
    print(
        f"predict it as {'FSDP' if ddp.units else 'DDP'} runs it: dpsim predict"
        f" --workload {shlex.quote(str(output))} --machine machine.json"
        f" --devices {ddp.devices} --local-batch {batches}"
    )
