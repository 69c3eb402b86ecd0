"""What this user's past predictions and studies came to: one file, beside the compiled kernels, a line for each entry.

A study keeps how far off its predictions were, of which ``residuals`` makes the factor by which ``interval`` widens the
next ones. A prediction and its score are kept for ``dpsim.model.ledger``. A line that cannot be read, or that another
version of dpsim wrote, is left as it is and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.kernels import cache
from dpsim.machine import Machine
from dpsim.model.residuals import MODEL, Residual, widths
from dpsim.uncertainty import IntervalWidth

MOST = 100
"""Of each kind of entry, and of studies on each type of machine: of older ones the machine may be another by now."""
_MOST_BYTES = 2**22
"""From here on a further entry has the older ones removed."""
FILE = "past.jsonl"


class Job(Noun, frozen=True):
    """What tells one training from another, as far as it decides the time of a step; empty texts are not known.

    ``parameters`` is a digest of the names, shapes and types of the trained tensors in their order. ``layout`` is the
    number of devices, or ``2x4``. ``cap`` is the fusion threshold in bytes, ``default`` where DDP chooses it.
    ``wire`` is the type of most gradients as they are sent. ``how`` says for dpsim's own runtime what its communication
    is. Times, paths, seeds and versions are no part of it.
    """

    parameters: str
    optimizer: str
    strategy: str
    layout: str
    local_batch: float
    accumulate: int
    fusion_rule: str
    cap: str
    wire: str
    device: str
    network: str
    how: str = ""


class Study(Noun, frozen=True, tag="study", tag_field="kind"):
    """The residuals of a finished study on a type of machine, with a version of the model of uncertainty."""

    measured_on: str
    residuals: tuple[Residual, ...]
    model: int = MODEL


class Expected(Noun, frozen=True):
    """A step that was predicted, and its interval; ``group`` and ``factor`` as ``dpsim.model.residuals`` has them."""

    job: Job
    step_s: float
    low_s: float
    high_s: float
    group: str
    factor: float = 1.0


class Prediction(Noun, frozen=True, tag="prediction", tag_field="kind"):
    """What one command line predicted, at a moment in UTC; ``sha256`` seals it with its ``inputs``.

    The seal shows a later change, and not that the moment is true. ``left_out`` points were more than an entry keeps.
    ``measured_on`` is the machine that widths are learnt for, and ``version`` that of PyTorch (empty: none).
    """

    at: str
    command: str
    workload: str
    machine: str
    measured_on: str
    inputs: dict[str, str]
    points: tuple[Expected, ...]
    dpsim: str
    model_version: int
    left_out: int = 0
    version: str = ""
    sha256: str = ""


class Score(Noun, frozen=True, tag="score", tag_field="kind"):
    """How far off a prediction was: ``steps`` clean steps of a ``run`` of its job had the median ``measured_s``."""

    at: str
    prediction: str
    run: str
    job: Job
    expected_s: float
    low_s: float
    high_s: float
    measured_s: float
    steps: int
    measured_on: str
    group: str
    ratio: float
    workload: str = ""
    model: int = MODEL

    @property
    def inside(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_s <= self.measured_s <= self.high_s


Entry = Study | Prediction | Score
_decoders: dict[Any, Any] = {kind: msgspec.json.Decoder(kind) for kind in (Study, Prediction, Score)}
_encoder = msgspec.json.Encoder(enc_hook=str)


class Kept(NamedTuple):
    """The lines of the file: entries by kind, oldest first; how many are damaged, and of another version."""

    studies: list[Study]
    predictions: list[Prediction]
    scores: list[Score]
    damaged: int
    foreign: int


def folder() -> Path | None:
    """Return where the file is: ``$DPSIM_STUDIES_DIR``, else beside the compiled kernels; None without a place."""
    if own := os.environ.get("DPSIM_STUDIES_DIR"):
        return Path(own)
    kernels = cache.folder()
    return None if kernels is None else kernels.parent / "studies"


def read(*, predictions: bool = True) -> Kept:
    """Return the latest ``MOST`` entries of each kind, and all studies. A file that cannot be read has none.

    Without ``predictions`` these, the longest, are left out.
    """
    place = folder()
    try:
        data = b"" if place is None else (place / FILE).read_bytes()
    except OSError:
        data = b""
    return _read(data, predictions)


@functools.lru_cache(maxsize=2)
def _read(data: bytes, predictions: bool) -> Kept:
    kept = Kept([], [], [], 0, 0)
    lists: dict[Any, list[Any]] = {Study: kept.studies, Prediction: kept.predictions, Score: kept.scores}
    damaged = foreign = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        kind = _kind_of(line)
        try:
            if kind is Prediction and not predictions:
                continue
            if kind is None:
                foreign += isinstance(msgspec.json.decode(line), dict)
                continue
            lists[kind].append(_decoders[kind].decode(line))
        except msgspec.ValidationError:
            foreign += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged += 1
    return Kept(kept.studies, kept.predictions[-MOST:], kept.scores[-MOST:], damaged, foreign)


def _kind_of(line: bytes) -> Any:
    return next((kind for kind in _decoders if line.startswith(b'{"kind":"%s"' % _tag(kind))), None)


def _tag(kind: Any) -> bytes:
    return str(kind.__struct_config__.tag).encode()


def append(entry: Entry) -> Path | None:
    """Add an entry, and return its file; None where it cannot be written. Two processes take turns."""
    place = folder()
    if place is None:
        return None
    line = _encoder.encode(entry) + b"\n"
    try:
        with _locked(place), open(place / FILE, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):  # of a process that was killed while it wrote
                line = b"\n" + line
            file.write(line)
            if size > _MOST_BYTES:
                file.seek(0)
                codec.write_bytes(place / FILE, b"".join(_latest(file.read().split(b"\n"))))
    except OSError:
        return None
    return place / FILE


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "past.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _latest(lines: Sequence[bytes]) -> list[bytes]:
    """Return the lines of the latest ``MOST`` entries of each kind and machine, and all that cannot be read."""
    counts: Counter[bytes] = Counter()
    kept = []
    for line in reversed([line for line in lines if line.strip()]):
        kind = _kind_of(line)
        if kind is not None:
            of_machine = line[: line.find(b'"residuals"')] if kind is Study else _tag(kind)
            counts[of_machine] += 1
            if counts[of_machine] > MOST:
                continue
        kept.append(line + b"\n")
    return kept[::-1]


def load(processor: str, cores: int) -> tuple[Residual, ...]:
    """Return the residuals of past studies on a type of machine, and of the predictions of it that were scored."""
    return _residuals(measured_on(processor, cores))


def _residuals(of_machine: str) -> tuple[Residual, ...]:
    kept = read(predictions=False)
    studies = [each for each in kept.studies if (each.measured_on, each.model) == (of_machine, MODEL)]
    of_studies = [residual for each in studies[-MOST:] for residual in each.residuals]
    scored: dict[tuple[str, str], list[float]] = {}
    for score in kept.scores:
        if (score.measured_on, score.model) == (of_machine, MODEL):
            scored.setdefault((score.prediction, score.group), []).append(score.ratio)
    of_scores = [
        Residual(study=study, kind="beforehand", group=group, ratios=tuple(ratios))
        for (study, group), ratios in scored.items()
    ]
    return (*of_studies, *of_scores)


def add(processor: str, cores: int, new: Sequence[Residual]) -> None:
    """Keep the residuals of a finished study; one that is kept already is not kept twice."""
    known = {residual.study for residual in load(processor, cores)}
    residuals = tuple(residual for residual in new if residual.study not in known)
    if residuals:
        append(Study(measured_on=measured_on(processor, cores), residuals=residuals))


def with_past_studies(machine: Machine, device: str = "") -> Machine:
    """Return a machine with what past studies and scored predictions on it say of predictions made beforehand.

    One that does not say what was measured of its speed, or whose widths are assumed already, keeps these widths until
    enough predictions of it have been scored, where ``device`` is the model of its devices: no study is of such a one.
    """
    of_machine = machine_key(machine, device)
    if machine.relative_uncertainty is None or "interval_widths" in machine.assumed:
        known = _enough(widths(_residuals(of_machine), "beforehand")) if of_machine else ()
        return (
            msgspec.structs.replace(machine, interval_widths=(*known, *machine.interval_widths)) if known else machine
        )
    return msgspec.structs.replace(machine, interval_widths=widths(_residuals(of_machine), "beforehand"))


def _enough(of_groups: Sequence[IntervalWidth]) -> tuple[IntervalWidth, ...]:
    return tuple(width for width in of_groups if width.studies)


def machine_key(machine: Machine, device: str) -> str:
    """Return what the widths of a machine are learnt for: its processor, or the model of its devices and its name.

    Empty where neither is known.
    """
    if machine.relative_uncertainty is not None:
        return measured_on(machine.calibrated_on.partition(",")[0], machine.cores)
    return f"{device} on {machine.name}" if device else ""


def measured_on(processor: str, cores: int) -> str:
    """Return how a type of machine is called."""
    return f"{processor}, {cores} cores"
