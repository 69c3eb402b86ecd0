"""``dpsim reproduce``: whether training gives the same bits in every configuration, and if not, where and why."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import explain_bits, flags, readers, show
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.harness.reproduce.baseline import BaselineComparison
    from dpsim.harness.reproduce.script_verdict import Verdict
    from dpsim.records.reproduce import Reproduction

EXAMPLES = """\
Examples:
  dpsim reproduce --model cnn --devices 1,2,3,4,8
  dpsim reproduce --batch-norm leaf,global,local --algorithm all
    --set overlap=all
  dpsim reproduce --set leaves=0 --algorithm ring --output plain
  dpsim reproduce --set wire_dtype=float16 --algorithm all
  dpsim reproduce --explain-bits --set leaves=0 --devices 1,2,4
    --algorithm ring,direct
  dpsim reproduce --output saved; dpsim reproduce --against saved
  dpsim reproduce --torch-script train.py --devices 1,2,4 -- --batch-size 32
  dpsim reproduce --torch-script train.py --accumulate 1,2,4
    -- --accumulate {accumulate}
  dpsim reproduce --torch-script train.py --devices 4 --resume-on 2"""
SHOWN = (
    "--torch-script --resume-on --fusion-threshold --accumulate --model --dataset --devices --algorithm --batch-norm "
    "--steps --strategy --set --explain-bits --against --output"
)
"""The flags that ``--help`` shows; ``--help-all`` shows all."""

_ALL = "all"
_PLURAL = {"fusion_threshold_bytes": "fusion_thresholds_bytes", "strategy": "strategies"}


class ReproduceFlags(
    flags.Flags,
    of="torch_script python script_may_write resume_on model dataset devices... fusion_threshold_bytes... accumulate..."
    " algorithm... batch_norm... steps against explain_bits output strategy...",
    by_set="global_batch overlap... leaves wire_dtype compute_dtype optimizer learning_rate seed",
):
    """The flags of what is compared, and of the record."""

    torch_script: str | None = flags.flag(
        "Your own PyTorch script, or module as python -m takes it, which trains with DistributedDataParallel or "
        "fully_shard: bug or rounding?"
    )
    fusion_threshold_bytes: str | None = flags.flag(
        "Bytes to fuse, like 0,32KiB,1MiB,inf; of a script sizes for DDP's bucket_cap_mb (its own).",
        name=("--fusion-threshold", "--bucket-cap"),
    )
    python: flags.Python = None
    script_may_write: flags.ScriptMayWrite = None
    resume_on: int | None = flags.flag(
        "Resume a script on so many devices from the checkpoint that it writes on --devices: what is lost? It gets the "
        "same arguments, or those after a second --."
    )
    accumulate: str | None = flags.flag(
        "Micro-batches of a step: 1,2,4 (1). A script gets the number for {accumulate} in its arguments; else each "
        "pass of its loop becomes one."
    )
    devices: str | None = flags.flag(
        "Numbers of devices: 1,2,4, or layouts: 2x4 (a script has 1,2,4; 2 with --accumulate)."
    )
    algorithm: str | None = flags.flag("all, or a list of dpsim's algorithms (auto).")
    batch_norm: str | None = flags.flag("List of leaf, global and local (leaf); local is trained without leaves.")
    steps: int | None = flags.flag("Steps to train in each run (50; 8 of a script).")
    against: Path | None = flags.flag(
        "Compare with the record in this folder, from an earlier dpsim reproduce; of a script with this baseline."
    )
    explain_bits: bool = flags.flag(
        "Start no rank: say which settings have the same bits, and why, and where the others differ first.",
        default=False,
    )
    output: Path | None = flags.flag(
        "Folder for the record with all digests, and the report; of a script a file for its baseline."
    )
    strategy: str | None = flags.flag("all, or a list of strategies as dpsim train has them (data-parallel).")
    json: flags.Json = False


def reproduce(
    *arguments: Annotated[str, Parameter(name="ARGUMENTS", help="Arguments of a script, after --.")],
    given: ReproduceFlags,
) -> int:
    """Train in every combination, and compare the bits with those on one device.

    Reports that they are identical, or the first step, tensor and element that
    differ, and the cause. Where identical bits are not promised, it measures the
    divergence and compares it with a prediction. Exits with 1 if bits differ
    that should be identical.

    With --torch-script your own script trains, unchanged, on each number of
    devices with the same global batches, each step begun from the same state:
    whether its losses and gradients differ by rounding or by a mistake, and
    in which step and tensor, and why. Exits with 1 for a mistake. With
    --resume-on it is started on --devices, ended after it has written a
    checkpoint, and resumed: which samples and what state are lost.
    """
    if given.torch_script is not None:
        run = _script if given.resume_on is None else _resumed
        return run(given, given.torch_script, arguments)
    if arguments or given.script_may_write or given.python or given.resume_on is not None:
        raise ConfigError(
            "ARGUMENTS, --script-may-write, --resume-on or --python without a script",
            allowed="these with --torch-script",
            remedy="name the script, or leave them out",
        )
    return _training(given)


def _training(given: ReproduceFlags) -> int:
    """Compare trainings of a model of dpsim's; 1 if bits differ that should be identical."""
    from dpsim import codec
    from dpsim.folder_lock import locked
    from dpsim.harness.load import KINDS
    from dpsim.harness.reproduce.against import check_comparable, compare_with_saved
    from dpsim.harness.reproduce.measure import measure
    from dpsim.records.reproduce import PREDICTIONS, RECORD
    from dpsim.report.saved import SavedResult

    against, output = given.against, given.output
    if given.explain_bits:
        if against is not None or output is not None:
            raise ConfigError(
                "--explain-bits with --against or --output",
                allowed="--explain-bits alone, which trains on no rank and makes no record",
                remedy="leave them out, or leave --explain-bits out to train",
            )
        explain_bits.explain(_reproduction(given), json=given.json)
        return 0
    flags.writable(output, folders=("reproduce",), inputs=(against,))
    reproduction = _reproduction(given)
    saved = None
    if against is not None:
        saved = check_comparable(against, reproduction)
    with locked(output):
        with show.progress() as progress:
            record = measure(reproduction, None if output is None else output / PREDICTIONS, progress)
        if saved is not None and against is not None:
            record = compare_with_saved(record, saved, against)
        if output is not None:
            codec.write_record(output / RECORD, record)
        show.result(SavedResult(KINDS["reproduce"], record), output, json=given.json, command="reproduce")
    return 0 if record.kept_promises else 1


def _reproduction(given: ReproduceFlags) -> Reproduction:
    """Return what is compared. Raises ``ConfigError``."""
    from dpsim.algorithms import RUNNABLE, algorithms_in
    from dpsim.optimizer import Sgd, changed
    from dpsim.plan import OVERLAPS
    from dpsim.records.reproduce import Reproduction
    from dpsim.strategy import SYNCHRONOUS

    fields = given.values()
    every = {"algorithm": algorithms_in(*RUNNABLE), "overlap": OVERLAPS, "strategy": SYNCHRONOUS}
    fields |= {name: values for name, values in every.items() if fields.get(name) == (_ALL,)}
    if fields.get("leaves") == 0:
        fields.setdefault("batch_norm", ("local",))
    optimizer = changed(Reproduction().optimizer, fields.pop("optimizer", None), readers.taken(fields, Sgd))
    names = Reproduction.__struct_fields__
    fields = {name if name in names else _PLURAL.get(name, f"{name}s"): value for name, value in fields.items()}
    return Reproduction(**fields, optimizer=optimizer)


_OF_ALL_SCRIPTS = ["torch_script", "python", "script_may_write", "devices", "steps", "json"]
_AXES_OF_SCRIPTS = ["fusion_threshold_bytes", "accumulate"]
_OF_SCRIPTS = [*_OF_ALL_SCRIPTS, *_AXES_OF_SCRIPTS, "compute_dtype", "against", "output"]
_OF_EXPLAINED_SCRIPTS = [*_OF_ALL_SCRIPTS, *_AXES_OF_SCRIPTS, "explain_bits"]
_OF_RESUMED = [*_OF_ALL_SCRIPTS, "resume_on"]


def _check_used(given: ReproduceFlags, used: list[str], what: str) -> None:
    """Raises ``ConfigError`` for flags that are not in ``used``."""
    if unused := [name for name in given.given() if name not in used]:
        raise ConfigError(
            f"{given.spelled(*unused)} with {what}, which brings its own training",
            allowed=given.spelled(*used),
            remedy="give the script its arguments after --",
        )


def _resumed(given: ReproduceFlags, script: str, arguments: tuple[str, ...]) -> int:
    """Resume the user's own script on another number of devices; 1 if something is lost."""
    from dpsim.harness.reproduce.resume import Resumption, resume

    _check_used(given, _OF_RESUMED, "a script that resumes")
    devices = readers.listed("--devices", given.devices, readers.whole_numbers("--devices")) or ()
    if given.resume_on is None or len(devices) != 1:
        raise ConfigError(
            "--resume-on without one --devices",
            allowed="one number of devices that writes the checkpoint, and one that resumes",
            remedy="give both, as in --devices 4 --resume-on 2",
        )
    second = arguments.index("--") if "--" in arguments else len(arguments)
    resumption = Resumption(
        script=script,
        arguments=arguments[:second],
        resumed_arguments=arguments[second + 1 :] if "--" in arguments else arguments,
        devices=devices[0],
        resume_on=given.resume_on,
        script_may_write=bool(given.script_may_write),
        python=given.python,
        **readers.provided(steps=given.steps),
    )
    with show.progress() as progress:
        resumed = resume(resumption, progress)
    if given.json:
        words = " ".join(resumed.sentences)
        show.print_json("reproduce", [resumed.point], {"verdict": words, "text": words, "comparable": True})
    else:
        print("\n".join(resumed.sentences))
    return 1 if resumed.judged.losses else 0


def _script(given: ReproduceFlags, script: str, arguments: tuple[str, ...]) -> int:
    """Compare the runs of the user's own script; 1 if there is a mistake."""
    from dpsim import codec
    from dpsim.harness.reproduce.baseline import compare_with_baseline, read_baseline
    from dpsim.harness.reproduce.script import ScriptComparison, compare

    _check_used(given, _OF_EXPLAINED_SCRIPTS if given.explain_bits else _OF_SCRIPTS, "a script")
    flags.writable(given.output, "baseline", inputs=(given.against,))
    comparison = ScriptComparison(
        script=script,
        arguments=arguments,
        script_may_write=bool(given.script_may_write),
        python=given.python,
        makes_baseline=given.against is not None or given.output is not None,
        **readers.provided(
            devices=readers.listed("--devices", given.devices, readers.whole_numbers("--devices")),
            caps_bytes=given.values().get("fusion_threshold_bytes"),
            accumulates=given.values().get("accumulate"),
            compute_dtype=given.values().get("compute_dtype"),
            steps=given.steps,
        ),
    )
    if given.explain_bits:
        explain_bits.explain_script(comparison, json=given.json)
        return 0
    saved = None
    if given.against is not None:
        saved = read_baseline(given.against, comparison.training)
    with show.progress() as progress:
        verdict = compare(comparison, progress)
    held, made = None, verdict.baseline
    if made is not None and saved is not None:
        held = compare_with_baseline(made, saved)
    if made is not None and given.output is not None:
        codec.write(given.output, made)
    _print(verdict, held, json=given.json)
    return 1 if verdict.is_mistake or (held is not None and held.differs) else 0


def _print(verdict: Verdict, held: BaselineComparison | None, *, json: bool) -> None:
    """Print the comparison of a script's runs, and with a baseline; with ``json`` its text is part of the object."""
    sentences = [*(f"By design: {design}." for design in verdict.designs), verdict.sentence]
    sentences += [] if held is None else held.sentences
    sentences += [f"Note: {note}." for note in verdict.notes]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        _print_table(verdict)
        print("\n".join(sentences))
    if json:
        points = [each.point for each in verdict.compared]
        baseline = {} if held is None else {"differs_from_baseline": held.differs, "baseline": " ".join(held.sentences)}
        summary = {
            "verdict": verdict.sentence,
            "comparable": verdict.finding is None or verdict.is_mistake,
            "by_design": list(verdict.designs),
            "notes": list(verdict.notes),
            "first": verdict.first.name,
            "text": text.getvalue(),
        }
        show.print_json("reproduce", points, summary | baseline)
        return
    print(text.getvalue(), end="")


def _print_table(verdict: Verdict) -> None:
    from dpsim.report.table import Column

    show.table(
        (
            Column(head="run", cell=lambda each: each.run.name, left=True),
            Column(head="steps", cell=lambda each: str(each.steps)),
            Column(head="samples a step", cell=lambda each: str(each.samples)),
            Column(
                head="largest difference / rounding",
                cell=lambda each: "" if each.largest is None else f"{each.largest:.2g}",
            ),
            Column(
                head="first that rounding does not explain",
                cell=lambda each: (
                    "none" if each.finding is None else f"step {each.finding.step}, {each.finding.tensor}"
                ),
                left=True,
            ),
        ),
        verdict.compared,
        title=f"gradients against those on {verdict.first.name}",
    )
