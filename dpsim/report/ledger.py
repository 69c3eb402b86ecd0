"""What the ledger says: the line that a run of a predicted job gets, the page, and the file to share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dpsim import codec
from dpsim.dates import day
from dpsim.model import past
from dpsim.model.ledger import LEAST_STEPS, Scored, seal, summary
from dpsim.model.past import Job, Kept, Prediction, Score
from dpsim.report.charts import Chart, Dot, Rows
from dpsim.report.content import Content
from dpsim.report.prediction import band
from dpsim.report.table import Column, Table, table
from dpsim.report.words import counted, percent
from dpsim.report.write import figure, write_content
from dpsim.units import format_duration, format_size

SCHEMA = "dpsim.ledger/1"
_MOST_ROWS, _MOST_REASONS = 30, 2
_RULES = (
    "A command line of dpsim predict, dpsim tune or the page with sliders leaves an entry with what it predicted.",
    "The next dpsim sweep, dpsim explain or dpsim report of the same job scores the latest entry from before that run,"
    f" by the median of at least {LEAST_STEPS} clean steps behind warm-up. A run is scored once.",
    "A job is the same where the names, shapes and types of its parameters in their order, the optimizer, the strategy,"
    " the devices and their model, the local batch, micro-batches, the bucket rule and cap, the type of what is sent,"
    " and the network are the same. What one of the two does not know does not count.",
    "The SHA-256 of an entry is of all that it has and of its inputs. It shows a later change of the entry, and not"
    " that its date is true. A changed entry is not scored.",
)


def sentences(scored: Scored) -> list[str]:
    """Return the line of a command's runs, or why there is none; nothing where nobody predicted any of them."""
    lines = []
    if scored.scores:
        count, inside, error = summary(scored.all_scores)
        last = f"your last {counted(count, 'prediction')}: {inside} inside, median error {percent(error)}"
        lines.append(f"{_of_runs(scored)}; {last}")
    if not scored.scores:
        lines += [f"Not scored: {each}" for each in scored.unscored[:_MOST_REASONS]]
    return lines


def _of_runs(scored: Scored) -> str:
    scores = [score for score, _ in scored.scores]
    if len(scores) == 1:
        ((score, entry),) = scored.scores
        other = _other_versions(entry, scored.runs[0].version)
        return f"Predicted {_on(entry.at)}: {_interval(score)}; measured {_verdict(score)}{other}"
    count, inside, error = summary(scores)
    days = " and ".join([*dict.fromkeys(_on(entry.at) for _, entry in scored.scores)][-2:])
    return f"{count} of these settings were predicted {days}: {inside} inside, median error {percent(error)}"


def _on(at: str) -> str:
    text = day(at)
    return f"at {text}" if ":" in text else f"on {text}"


def _other_versions(entry: Prediction, version: str) -> str:
    if not entry.version or not version or entry.version == version:
        return ""
    return f" (predicted of PyTorch {entry.version}, run with {version})"


def _interval(score: Score) -> str:
    expected, low, high = (format_duration(each) for each in (score.expected_s, score.low_s, score.high_s))
    return f"{expected} ({low} to {high})"


def _verdict(score: Score) -> str:
    if score.inside:
        return f"{format_duration(score.measured_s)}: inside"
    end, side = (score.high_s, "above") if score.measured_s > score.high_s else (score.low_s, "below")
    return f"{format_duration(score.measured_s)}: outside, {percent(abs(score.measured_s / end - 1))} {side}"


def record(scored: Scored) -> dict[str, Any]:
    """Return what JSON says of it."""
    count, inside, error = summary(scored.all_scores)
    return {
        "scores": [_score_record(score) for score, _ in scored.scores],
        "unscored": list(scored.unscored),
        "predictions_scored": count,
        "predictions_inside": inside,
        "median_error": error,
    }


def _score_record(score: Score) -> dict[str, Any]:
    names = ("at", "expected_s", "low_s", "high_s", "measured_s", "steps", "inside")
    return {name: getattr(score, name) for name in names} | {"job": codec.to_builtins(score.job)}


def described(job: Job) -> str:
    """Return a job in a line, without its model: devices, network, batch, buckets."""
    batch = f"local batch {job.local_batch:g}" + f" x {job.accumulate}" * (job.accumulate > 1)
    cap = format_size(float(job.cap)) if job.cap.isdigit() or job.cap == "inf" else job.cap
    buckets = f"{job.fusion_rule} {cap}".strip()
    where = f"{job.layout} on {job.network}" if job.network else job.layout
    strategy = "" if job.strategy == "data-parallel" else job.strategy
    return ", ".join(filter(None, (where, batch, strategy, buckets)))


def lines(kept: Kept) -> list[str]:
    """Return what there is to say of all that is kept: how good predictions were, and what cannot be used."""
    count, inside, error = summary(kept.scores)
    waiting = {entry.sha256 for entry in kept.predictions} - {score.prediction for score in kept.scores}
    said = [
        f"{counted(count, 'prediction')} scored: {inside} inside the interval, median error {percent(error)}."
        if count
        else "No prediction has been scored yet: run a job that was predicted with dpsim explain or dpsim sweep.",
        f"{counted(len(waiting), 'command line')} waiting for a run of what they predicted.",
    ]
    changed = sum(entry.sha256 != seal(entry) for entry in kept.predictions)
    unusable = {
        changed: "changed since it was written, as its SHA-256 shows",
        kept.damaged: "damaged",
        kept.foreign: "written by another version of dpsim",
    }
    return said + [
        f"{counted(number, 'entry').replace('entrys', 'entries')}: {why}; not used, and left as it is."
        for number, why in unusable.items()
        if number
    ]


def columns() -> tuple[Column[Score], ...]:
    """Return the columns of the table of scores."""
    return (
        Column(head="measured on", cell=lambda s: day(s.at), left=True),
        Column(head="model", cell=lambda s: s.workload, left=True),
        Column(head="job", cell=lambda s: described(s.job), left=True, dispensable=1),
        Column(head="predicted", cell=lambda s: format_duration(s.expected_s)),
        Column(head="interval", cell=lambda s: band(s.low_s, s.high_s)),
        Column(head="measured", cell=lambda s: format_duration(s.measured_s)),
        Column(head="clean steps", cell=lambda s: str(s.steps), dispensable=3),
        Column(head="inside", cell=lambda s: "inside" if s.inside else "outside", left=True),
    )


def scores_table(kept: Kept) -> Table:
    """Return the table of the scores, the latest first."""
    return table(columns=columns(), sections={"": kept.scores[::-1]}, title="Scored predictions")


def waiting_table(kept: Kept) -> Table:
    """Return the table of the command lines that no run has scored, the latest first."""
    scored = {score.prediction for score in kept.scores}
    waiting = [entry for entry in reversed(kept.predictions) if entry.sha256 not in scored]
    of_entries: tuple[Column[Prediction], ...] = (
        Column(head="predicted on", cell=lambda e: day(e.at), left=True),
        Column(head="command", cell=lambda e: e.command, left=True),
        Column(head="model", cell=lambda e: e.workload, left=True),
        Column(head="machine", cell=lambda e: e.machine, left=True),
        Column(head="steps", cell=lambda e: str(len(e.points) + e.left_out)),
        Column(head="first", cell=lambda e: described(e.points[0].job), left=True, dispensable=1),
    )
    return table(columns=of_entries, sections={"": waiting}, title="Waiting for a run")


def _chart(scores: Sequence[Score]) -> Chart:
    shown = scores[-_MOST_ROWS:]
    rows = Rows(
        title="Measured over predicted",
        subtitle="dots: measured; bars: the predicted interval",
        x_label="measured over predicted; right of 1: predicted too fast",
        rows={
            f"{number}. {day(each.at)}, {each.workload}": [
                Dot(value=1.0, low=each.low_s / each.expected_s, high=each.high_s / each.expected_s, look="predicted"),
                _measured(each),
            ]
            for number, each in enumerate(shown, start=len(scores) - len(shown) + 1)
        },
        log=True,
    )
    return Chart(panels=[rows], height_in=0.8 + 0.4 * len(shown), columns=1)


def _measured(score: Score) -> Dot:
    of_predicted = score.measured_s / score.expected_s
    return Dot(value=of_predicted, low=of_predicted, high=of_predicted, look="measured")


def write(folder: Path, kept: Kept) -> list[Path]:
    """Write the page of the ledger into a folder. Raises ``ConfigError``."""
    content = Content(
        name="ledger",
        heading="How right predictions were here",
        question="What was predicted on this machine, and what was measured then?",
        answers=tuple(lines(kept)),
        cards=(),
        tables=tuple(each for each in (scores_table(kept), waiting_table(kept)) if each.sections[0].rows),
        warnings=(),
        rules=_RULES,
        facts=(("file", str((past.folder() or Path()) / past.FILE)),),
        environment=(),
    )
    caption = "Each row is a scored prediction: the bar is its interval, and the dot what was measured, over predicted."
    drawn = figure("scores", "Measured over predicted", caption, _chart(kept.scores) if kept.scores else None)
    return write_content(folder, content, [drawn])


def shared(kept: Kept) -> dict[str, Any]:
    """Return the scores without names: of models, machines, networks and optimizers there are numbers.

    Dates have no time of day. What else a job is, and what was predicted and measured of it, stays.
    """
    numbers: dict[tuple[str, str], int] = {}

    def number(kind: str, name: str) -> str:
        return (
            f"{kind} {numbers.setdefault((kind, name), 1 + sum(each == kind for each, _ in numbers))}" if name else ""
        )

    def of_job(job: Job) -> Mapping[str, Any]:
        named = {name: number(name.removesuffix("s"), getattr(job, name)) for name in ("parameters", "optimizer")}
        network = job.network if job.network in ("", "node") or job.network.startswith(("paced:", "shaped:")) else ""
        named["network"] = network or number("network", job.network)
        return msgspec.structs.asdict(job) | named

    return {
        "schema": SCHEMA,
        "scores": [
            _score_record(score)
            | {"at": score.at[:10], "job": of_job(score.job), "machine": number("machine", score.measured_on)}
            for score in kept.scores
        ],
    }
