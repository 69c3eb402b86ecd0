"""Step times or throughputs that somebody measured, as rows: of a CSV or TOML file, or of the command line."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dpsim import codec
from dpsim.collective import parse_devices
from dpsim.errors import ConfigError, DpsimError, FileFormatError, unknown
from dpsim.machine import Machine
from dpsim.model.estimate import MeasuredStep
from dpsim.model.points import default_algorithm
from dpsim.plan import Plan, samples_of_step
from dpsim.strategy import DataParallel
from dpsim.units import format_duration, parse_duration, parse_size

STEP, RATE, BATCH = "step_s", "images_per_s", "local_batch"
FIELDS = (BATCH, STEP, RATE, *Plan.__struct_fields__)
"""What a row may say: the measured step or rate, the local batch, and the fields of a plan."""
_MOST_BYTES = 10 * 2**20
_TRAINING_S = 600.0
"""From here on what was measured is a training, not a step."""
Number = TypeVar("Number", int, float)


def read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (its location, its fields) of each row of a file: CSV with a header, or TOML with ``[[rows]]``.

    Raises ``FileFormatError``.
    """
    try:
        data = path.read_bytes()
        if len(data) > _MOST_BYTES:
            raise FileFormatError(f"{path} has {len(data)} bytes", allowed="at most 10 MiB")
        text = data.decode("utf-8-sig")
        if path.suffix == ".toml":
            rows = tomllib.loads(text).get("rows", [])
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise FileFormatError(f"{path}: rows is no list of tables", allowed="[[rows]]")
            found = [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
        else:
            found = [(f"{path}, line {line}", row) for line, row in _csv(text, path)]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, csv.Error) as error:
        raise FileFormatError(
            f"{path}: {error}", allowed="a CSV file with a header, or a TOML file with [[rows]]"
        ) from error
    if not found:
        kind = "[[rows]]" if path.suffix == ".toml" else "a header and rows"
        raise FileFormatError(f"{path} has no rows", allowed=f"{kind} with devices, {BATCH}, and {STEP} or {RATE}")
    return found


def _csv(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise FileFormatError(f"{path}, line 1: columns twice: {', '.join(twice)}", allowed="each column once")
    for row in reader:
        if None in row or None in row.values():
            raise FileFormatError(
                f"{path}, line {reader.line_num}: not as many values as the header has columns",
                allowed=f"a value for each of {len(reader.fieldnames or ())} columns",
            )
        yield reader.line_num, {name: value.strip() for name, value in row.items() if value.strip()}


def measured_steps(
    rows: Sequence[tuple[str, Mapping[str, Any]]], machine: Machine, **common: Any
) -> list[MeasuredStep]:
    """Return the plans and steps of rows, each with its location; ``common`` are fields of rows that say nothing else.

    As in a prediction the algorithm is ``default_algorithm`` and a machine without overlap tables overlaps. Raises
    ``ConfigError`` with the location.
    """
    defaults = {"overlap": "off" if machine.overlap else "thread"} | common
    steps = []
    for location, row in rows:
        try:
            steps.append(_measured(row, defaults, machine))
        except DpsimError as error:
            raise ConfigError(f"{location}: {error.given}", allowed=error.allowed, remedy=error.remedy) from error
    return steps


def steps_of_trainings(
    rows: Sequence[MeasuredStep], steps: float | None, samples: float | None, *, batch_known: bool
) -> list[MeasuredStep]:
    """Return one step of each training, where rows are whole ones: of so many ``steps``, or so many ``samples``.

    With neither, rows are steps, and are returned as they are. Raises ``ConfigError`` where they are too long for that,
    and for trainings whose batch is not known.
    """
    longest_s = max(row.step_s for row in rows)
    if steps is None and samples is None:
        if longest_s < _TRAINING_S:
            return list(rows)
        raise ConfigError(
            f"--measured has {format_duration(longest_s)}, which is a training and no step",
            allowed="whole trainings with the steps or the samples of each",
            remedy="say what all of them trained: --steps 90000 if each made as many steps, or --samples 1.28M if each"
            " saw as many samples; and --local-batch or --global-batch",
        )
    if steps is not None and samples is not None:
        raise ConfigError("--steps and --samples with --measured", allowed="one of the two")
    if not batch_known:
        raise ConfigError(
            "whole trainings without the samples of a step",
            allowed="--local-batch, which is the same on each device, or --global-batch",
            remedy="give what the training script was told: --local-batch 32",
        )
    number = steps if samples is None else samples
    if not number or not 0 < number < math.inf:
        raise ConfigError(f"trainings of {number:g}", allowed="1 or more")
    return [
        row._replace(step_s=row.step_s / (number if samples is None else samples / row.plan.global_batch))
        for row in rows
    ]


def _measured(row: Mapping[str, Any], defaults: Mapping[str, Any], machine: Machine) -> MeasuredStep:
    for name in (*defaults, *row):
        if name not in FIELDS:
            raise unknown("field of a row", name, sorted(FIELDS))
    fields = {name: _value(name, value) for name, value in {**defaults, **row}.items()}
    outcome = {name: fields.pop(name) for name in (STEP, RATE) if name in fields}
    if "devices" not in fields or len(outcome) != 1 or (BATCH in fields) == ("global_batch" in fields):
        raise ConfigError(
            f"a row with {', '.join(row) or 'no fields'}",
            allowed=f"devices, {BATCH} or global_batch, and {STEP} or {RATE}",
            remedy="give each of the three, as in devices=8,local_batch=32,step_s=20ms",
        )
    devices, layout = parse_devices(fields.pop("devices"))
    fields.setdefault("layout", layout)
    local_batch = fields.pop(BATCH, None)
    fields.setdefault("algorithm", default_algorithm(machine, fields.get("wire_dtype")))
    try:
        if local_batch is not None:
            samples, count = _number(BATCH, local_batch, int), _number("accumulate", fields.get("accumulate", 1), int)
            fields["global_batch"] = samples_of_step(samples, devices, count, fields.get("strategy", DataParallel.name))
        plan = codec.convert(fields | {"devices": devices}, Plan, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, DpsimError):
            raise error.__cause__ from error
        raise ConfigError(str(error), allowed="values of the fields of a plan, and numbers") from error
    (value,) = (_number(name, number, float) for name, number in outcome.items())
    return MeasuredStep(plan, plan.global_batch / value if RATE in outcome else value)


def _number(name: str, raw: Any, kind: type[Number]) -> Number:
    """Return the number of a field, which has to be finite and above 0. Raises ``ConfigError``."""
    try:
        value = msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError:
        value = kind(0)
    if not 0 < value < math.inf:
        allowed = "a whole number of 1 or more" if kind is int else "a finite number > 0"
        raise ConfigError(f"{name} is {raw}", allowed=allowed)
    return value


def _value(name: str, value: Any) -> Any:
    """Return a field's value, of a text with a unit the number. Raises ``ConfigError``."""
    if not isinstance(value, str) or name == RATE or value[-1:].isdigit():
        return value
    if name.endswith("_bytes"):
        return parse_size(value)
    return parse_duration(value) if name.endswith("_s") else value
