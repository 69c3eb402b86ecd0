"""``dpsim predict --find``: which value reaches a target, in a sentence."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.model.hours import Training
    from dpsim.model.inverse import Goal, Prepare, Target
    from dpsim.setting import Grid
    from dpsim.workload import Workload


class FindFlags(flags.Flags):
    """What is to be found, and the target that a prediction with it reaches."""

    find: str | None = flags.flag(
        "Find what reaches a target instead: bandwidth, latency, devices (how many, up to --devices), local-batch; or"
        " the best bucket."
    )
    target: list[str] | None = flags.flag(
        "What is to be reached, as GOAL=VALUE: efficiency=90%, speedup=6 over one device, step-time=200ms, or with"
        " --samples hours=24, and with --price too cost=500.",
        negative="",
    )

    def wanted(self, training: Training | None) -> Target | None:
        """Return the target; ``None`` where there is none. Raises ``ConfigError`` where one is missing, or too many."""
        from dpsim.errors import ConfigError, unknown
        from dpsim.fields import assigned
        from dpsim.model.hours import NO_TRAINING
        from dpsim.model.inverse import GOALS, QUANTITIES, Target
        from dpsim.units import parse_count, parse_duration, parse_share

        if self.find not in (None, *QUANTITIES):
            raise unknown("quantity to --find", self.find, QUANTITIES)
        read = {"efficiency": parse_share, "step-time": parse_duration}
        targets = []
        for goal, text in assigned(self.target or (), "--target", GOALS).items():
            reader = read.get(goal, functools.partial(parse_count, what=f"--target {goal}", example=f"{goal}=24"))
            targets.append(Target(goal=cast("Goal", goal), value=reader(text), training=training or NO_TRAINING))
        needed = self.find not in (None, "bucket")
        if len(targets) > 1 or (targets and self.find is None) or (needed and not targets):
            where = "without --find" if self.find is None else f"for --find {self.find}"
            raise ConfigError(
                f"{len(targets) or 'no'} target{'s' if len(targets) > 1 else ''} {where}",
                allowed=f"--find with one --target of {', '.join(GOALS)}; the best bucket needs none",
                remedy="write it like --find bandwidth --target efficiency=90%",
            )
        return targets[0] if targets else None


class Found(NamedTuple):
    """An answer in a sentence and as a flat record, with what it rests on, in sentences."""

    sentence: str
    record: dict[str, Any]
    notes: Sequence[str]


def refuse_beside(question: str, given: Mapping[str, object]) -> None:
    """Refuse flags that have no meaning beside another one. Raises ``ConfigError``."""
    from dpsim.errors import ConfigError

    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{question} and {flag}", allowed="one of the two", remedy=f"leave {flag} out")


def answers(
    quantity: str,
    target: Target | None,
    workload: Workload,
    machines: Mapping[str, Machine],
    grid: Grid,
    prepare: Prepare,
    training: Training | None = None,
) -> list[Found]:
    """Return the answer for each machine and number of devices; how many devices, once, up to the last number.

    Where there is a ``training``, each answer says what it takes there.
    """
    from dpsim.model.hours import OF_SAMPLES
    from dpsim.report.prediction import of_training

    devices = grid.values("devices")
    counts = devices[-1:] if quantity == "devices" else devices
    answered = []
    for name, machine in machines.items():
        for count in counts:
            answer = _answer(quantity, target, workload, machine, grid.changed(devices=count), prepare)
            before = f"{Path(name).stem}: " if len(machines) > 1 else ""
            record, text, notes = {"machine": name} | answer.record, before + answer.sentence, answer.notes
            if training is not None:
                record |= training.record(record)
                text += of_training(record, " All samples then") + "." * ("hours" in record)
                notes = [*notes, OF_SAMPLES] if "hours" in record else notes
            answered.append(Found(text, record, notes))
    return answered


def _answer(
    quantity: str,
    target: Target | None,
    workload: Workload,
    machine: Machine,
    grid: Grid,
    prepare: Prepare,
) -> Found:
    from dpsim.model.inverse import find
    from dpsim.model.ranking import best_bucket
    from dpsim.report.inverse import bucket_sentence, of_tables, sentence
    from dpsim.report.words import interval_sentence

    weak, question, notes = not grid.values("global_batch"), dict[str, Any](find=quantity), list[str]()
    if target is not None:
        question |= {"goal": target.goal, "target": target.value}
    if target is None or quantity == "bucket":
        refuse_beside("--find", {"--fusion-threshold": grid.values("fusion_threshold_bytes") or None})
        best = best_bucket(workload, prepare(machine), grid)
        record = question | {"value": best.row.fusion_threshold_bytes, "value_low": best.alike[0]}
        record |= {"value_high": best.alike[1], "default_step_s": best.default.step_s}
        record |= dict(zip(("ratio", "ratio_low", "ratio_high"), best.row.gain, strict=True))
        text, point = bucket_sentence(best, target, weak=weak), best.row.record()
        summary = best.predicted.summary()
    else:
        answer = find(quantity, target, workload, machine, grid, prepare)
        record = question | {"value": answer.value, "value_low": answer.low, "value_high": answer.high}
        record |= {"value_until": answer.until, "predicted_at": answer.at}
        text, point, summary = sentence(answer, weak=weak), answer.point, answer.summary
        notes = [of_tables(answer)]
    of_interval = (summary[name] for name in ("interval_level", "interval_studies", "interval_clusters"))
    notes += [interval_sentence(*of_interval), summary["from_script"]]
    return Found(text, record | point, [*filter(None, notes), *summary["cautions"]])


def show_answers(found: Sequence[Found], summary: Mapping[str, Any], output: Path | None, *, json: bool) -> None:
    """Print the sentences, with what they rest on; or all of it as JSON, which also goes into ``output``."""
    sentences, cautions = (
        [each.sentence for each in found],
        list(dict.fromkeys(note for f in found for note in f.notes)),
    )
    records = [each.record for each in found]
    said = {**summary, "sentences": sentences, "cautions": cautions}
    if show.as_json("predict", records, said, output, json=json):
        return
    for sentence in sentences:
        print(sentence)
    for note in cautions:
        print(f"Note: {note}.")
